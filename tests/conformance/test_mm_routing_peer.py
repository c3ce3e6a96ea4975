"""Images to the KV router: both houses' frontends tell a worker the same of the same conversation."""

import asyncio
import base64
import json
import os
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler

pytestmark = pytest.mark.conformance

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type in
('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}{% endif
%}{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def write_model(folder: Path, *, processor: bool = True) -> str:
    """A model of Qwen2-VL's kind whose tokens are letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3, "hidden_size": 64}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": len(letters) + len(SPECIAL),
        "max_position_embeddings": 32768,
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_config": vision,
    }
    bounds = {"min_pixels": 3136, "max_pixels": 1_003_520, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"]]},
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"},
    }
    if processor:
        files["preprocessor_config.json"] = {**bounds, "image_processor_type": "Qwen2VLImageProcessor"}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def image(width: int, height: int) -> dict[str, Any]:
    """A black PNG."""
    rows = zlib.compress(bytes((1 + width) * height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    parts = [struct.pack(">I", len(body)) + kind + body + _checksum(kind + body) for kind, body in chunks]
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _checksum(chunk: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(chunk))


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [text("what is this? "), image(56, 56)],
    [image(280, 140), text(" and "), image(56, 56)],
    [image(70, 280)],
    [image(1, 1)],
    [image(4000, 3000)],
    [image(3000, 16)],
    [image(5000, 10)],
    [text("nothing to see")],
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, text("broken")],
]


class Worker:
    """A worker in this process that keeps what it is asked."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.runtime = DistributedRuntime()
        self.asked: list[dict[str, Any]] = []

    async def start(self) -> None:
        endpoint = self.runtime.endpoint("dynamo.backend.generate")
        await register_model(
            ModelInput.Tokens, ModelType.Chat, endpoint, self._model, MODEL_NAME,
            worker_type=WorkerType.Aggregated, kv_cache_block_size=16,
        )  # fmt: skip
        await endpoint.serve(GeneratorHandler(self._generate, self.runtime.tasks))

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        yield {"token_ids": [40], "index": 0, "finish_reason": "stop"}


async def told(worker: Worker, stack: Stack) -> list[Any]:
    """What of each conversation's images reaches the worker."""
    found = []
    for content in CONVERSATIONS:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        worker.asked.clear()
        status, answer = await asyncio.to_thread(stack.ask, "POST", "/v1/chat/completions", body)
        assert status == 200, answer
        (request,) = worker.asked
        found.append((request["token_ids"], request.get("mm_routing_info"), _hashes(request)))
    return found


def _hashes(request: dict[str, Any]) -> Any:
    return (request.get("extra_args") or {}).get("mm_hashes")


@pytest.mark.parametrize("processor", [True, False])
async def test_both_frontends_tell_the_same_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: bool
) -> None:
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    variables = {"DYN_FILE_KV": str(tmp_path / "kv"), "DYN_EVENT_PLANE_HOST": HOST}
    for name, value in {**variables, "DYN_TCP_RPC_HOST": HOST, "DYN_TCP_RESPONSE_STREAM_HOST": HOST}.items():
        monkeypatch.setenv(name, value)
    worker = Worker(write_model(tmp_path / "model", processor=processor))
    await worker.start()
    found = []
    try:
        for house in (ours(), theirs(peer_python())):
            recipe = Recipe(
                name="mm", frontend=house, engine=house, workers=0, frontend_flags=("--router-mode", "kv"),
                variables=variables,
            )  # fmt: skip
            stack = Stack(recipe, os.fspath(tmp_path))
            try:
                await asyncio.to_thread(stack.__enter__)
                found.append(await told(worker, stack))
            finally:
                await asyncio.to_thread(stack.close)
    finally:
        await worker.runtime.shutdown()
    mine, other = found
    for content, one, another in zip(CONVERSATIONS, mine, other, strict=True):
        assert one == another, [part.get("text") for part in content]
    assert [info is not None for _, info, _ in mine] == [processor and place not in (7, 8) for place in range(9)]
