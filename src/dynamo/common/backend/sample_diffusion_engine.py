"""SampleDiffusionEngine: an engine without a model that returns a small image, for tests and as an example.

Run it with `python -m dynamo.common.backend.sample_diffusion_main`.
"""

import asyncio
import base64
import struct
import time
import zlib
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.common.backend.engine import DiffusionEngine, EngineConfig, RawRequest, RawResponseChunk
from dynamo.common.backend.health_check import build_raw_health_check_payload
from dynamo.common.backend.sample_engine import sample_config, sample_parser
from dynamo.common.backend.worker import WorkerConfig
from dynamo.model_card.types import ModelInput
from dynamo.runtime.context import Context

MAX_IMAGES = 10  # The maximum of the OpenAI API.


class SampleDiffusionEngine(DiffusionEngine):
    """An engine for `/v1/images/generations` that takes `delay` seconds per request."""

    def __init__(self, model_name: str = "sample-diffusion-model", delay: float = 0.05) -> None:
        self.model_name = model_name
        self.delay = delay

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> "tuple[SampleDiffusionEngine, WorkerConfig]":
        """Parse the command line."""
        parser = sample_parser("Sample engine for images", "sample-diffusion-model", "images")
        parser.add_argument("--delay", type=float, default=0.05, help="Seconds per request")
        args = parser.parse_args(argv)
        config = sample_config(args, model_input=ModelInput.Text, enable_kv_routing=False)
        return cls(args.model_name, args.delay), config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.model_name, served_model_name=self.model_name)

    async def cleanup(self) -> None:
        """Free nothing: the engine has no resources."""

    async def health_check_payload(self) -> dict[str, Any]:
        return build_raw_health_check_payload({"prompt": "ping", "n": 1, "response_format": "b64_json"})

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        count = count_of(request.get("n", 1))
        await asyncio.sleep(self.delay)
        picture = base64.b64encode(png()).decode()
        is_inline = request.get("response_format") == "b64_json"
        image = {"b64_json": picture} if is_inline else {"url": f"data:image/png;base64,{picture}"}
        yield {"created": int(time.time()), "data": [dict(image) for _ in range(count)]}


def count_of(given: Any) -> int:
    """Return the number of images of a request. Raise `ValueError` if it is not 1 to 10."""
    try:
        count = int(given)
    except (TypeError, ValueError):
        raise ValueError(f"n {given!r}: must be an integer") from None
    if not 1 <= count <= MAX_IMAGES:
        raise ValueError(f"n {count}: must be between 1 and {MAX_IMAGES}")
    return count


def png() -> bytes:
    """Return an image of one grey pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)  # Width, height, 8 bits of grey.
    row = b"\0\x80"  # No filter, one pixel.
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(row)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
