"""The released bindings as `benchmarks.block_hashing` measures them; runs as a program of the peer's interpreter."""

import json

from block_hashing_cases import measured  # type: ignore[import-not-found]

from dynamo._core import compute_block_hash_for_seq  # type: ignore[import-not-found]

print(json.dumps(measured(compute_block_hash_for_seq)))
