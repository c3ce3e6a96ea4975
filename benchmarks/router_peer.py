"""Adapter of the released index for `benchmarks.router_cases`; runs under the peer's interpreter."""

import json
from typing import Any

from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

HAS_HOP = True
Tree = RadixTree
hash_blocks = compute_block_hash_for_seq


def question(hashes: list[int]) -> list[int]:
    return hashes


def find(tree: Any, prompt: list[int]) -> Any:
    return tree.find_matches(prompt)


def scores(tree: Any, prompt: list[int]) -> Any:
    return tree.find_matches(prompt).scores


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "dp_rank": 0, "data": data}).encode()


def stored_event(worker: int, parent: int | None, hashes: list[int]) -> tuple[int, bytes]:
    blocks = [{"block_hash": one ^ 0x5555, "tokens_hash": one} for one in hashes]
    return worker, _event({"stored": {"parent_hash": parent, "blocks": blocks}})


def removed_event(worker: int, hashes: list[int]) -> tuple[int, bytes]:
    return worker, _event({"removed": {"block_hashes": [one ^ 0x5555 for one in hashes]}})


def apply(tree: Any, change: tuple[int, bytes]) -> None:
    tree.apply_event(*change)


def store(tree: Any, worker: int, parent: int | None, hashes: list[int]) -> None:
    apply(tree, stored_event(worker, parent, hashes))


def remove_worker(tree: Any, worker: int) -> None:
    tree.remove_worker(worker)
