"""The sample engine for images."""

from typing import Any

import pytest

from dynamo.common.backend.sample_diffusion_engine import SampleDiffusionEngine
from dynamo.runtime.context import Context


async def output(engine: SampleDiffusionEngine, **request: Any) -> list[Any]:
    return [chunk async for chunk in engine.generate({"prompt": "a cat", **request}, Context())]


async def test_images_are_urls_unless_the_request_selects_base64() -> None:
    engine = SampleDiffusionEngine(delay=0)
    (linked,) = await output(engine)
    assert linked["data"][0]["url"].startswith("data:image/png;base64,")
    (inline,) = await output(engine, n="2", response_format="b64_json")
    assert [*inline["data"][1]] == ["b64_json"]
    for wrong in (0, 11, None, "x"):
        with pytest.raises(ValueError, match="must be"):
            await output(engine, n=wrong)
