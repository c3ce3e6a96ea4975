"""LoRA adapters of the bundled demo model for process tests, and transformers' output with merged weights.

Only the latter needs PyTorch and transformers.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.unit.cpu.conftest import random_adapter

from dynamo.cpu.config import DEMO_MODEL

RANK, ALPHA = 4, 8
STRENGTH = 1.0
"""Strength at which each adapter's output differs from the model's and from other adapters'."""


def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    return found


def tensors_of(seed: int, targets: Sequence[str]) -> dict[str, Any]:
    return random_adapter(config(), targets=targets, rank=RANK, seed=seed, strength=STRENGTH)


def write(path: Path, seed: int, targets: Sequence[str]) -> Path:
    """Write an adapter in PEFT's layout."""
    path.mkdir(parents=True)
    reported = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(reported))
    save_file(tensors_of(seed, targets), path / "adapter_model.safetensors")
    return path


@cache
def tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


@cache
def merged(seed: int | None, targets: tuple[str, ...] = ()) -> Any:
    """Return the model in transformers, with an adapter's product added to its weights."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    if seed is not None:
        parameters = dict(model.named_parameters())
        tensors = tensors_of(seed, targets)
        with torch.no_grad():
            for name, down in tensors.items():
                if name.endswith(".lora_A.weight"):
                    up = tensors[name.replace("lora_A", "lora_B")]
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    delta = (up.astype(np.float64) @ down.astype(np.float64)) * (ALPHA / RANK)
                    parameters[f"{module}.weight"] += torch.from_numpy(delta.astype(np.float32))
    return model


def greedily(model: Any, prompt: list[int], count: int) -> str:
    """Return the greedy tokens after a prompt, without an end token."""
    import torch

    tokens = torch.tensor([prompt])
    with torch.no_grad():
        cached: Any = None
        output: list[int] = []
        inputs = tokens
        for _ in range(count):
            out = model(inputs, past_key_values=cached, use_cache=True)
            cached = out.past_key_values
            output.append(int(out.logits[0, -1].argmax()))
            inputs = torch.tensor([[output[-1]]])
    text: str = tokenizer().decode(output, skip_special_tokens=True)
    return text
