"""Model directory of the Qwen2-VL type whose tokens are letters, and images for it."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type in
('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}{% endif
%}{% endfor %}{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def write_model(folder: Path, *, processor: bool = True) -> str:
    """Write a model of the Qwen2-VL type whose tokens are letters."""
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
    """Return a black PNG."""
    rows = zlib.compress(bytes((1 + width) * height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    parts = [struct.pack(">I", len(body)) + kind + body + _checksum(kind + body) for kind, body in chunks]
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _checksum(chunk: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(chunk))
