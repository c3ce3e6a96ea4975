"""LoRA: read and validate adapters in PEFT layout: `adapter_config.json` and `adapter_model.safetensors`.

The transformations applied to the model's matrices on loading (dynamo.cpu.model) are applied to the adapter as well, so that
the two add up. Unsupported settings are rejected by name: an adapter is used exactly as it was trained, or not at all.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64

from dynamo.core.errors import ConfigError
from dynamo.cpu.adapter import F32, Adapter, AdapterDelta, LayerDeltas
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.checkpoint import Checkpoint, read_json
from dynamo.cpu.model import interleaved

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TARGETS = (*ATTENTION, *MLP)
ALL_LINEAR = "all-linear"
CHUNK_BYTES = 1 << 20

REFUSED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
    "layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config",
)  # fmt: skip
"""Settings that change the computation of an adapter in ways that this engine does not support."""

_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj))\.lora_([AB])(?:\.default)?\.weight"
)


def read_adapter(path: str, name: str, number: int, *, model_path: str, shape: Architecture, rank_max: int) -> Adapter:
    """Read an adapter. Raise `ConfigError` if it does not fit the model or exceeds the engine's limits."""
    config = read_json(os.path.join(path, CONFIG))
    scales = _Scales(config, path, rank_max)
    file = os.path.join(path, WEIGHTS)
    if not os.path.isfile(file):
        raise ConfigError(f"{path}: {WEIGHTS} is missing")
    checkpoint = Checkpoint(path, single=WEIGHTS)
    modules = _modules(checkpoint, shape)
    scales.check_targets(modules)
    base = Checkpoint(model_path)
    layers = [_Reader(checkpoint, base, shape, scales, modules, number).layer() for number in range(shape.layers)]
    return Adapter(name, number, _fingerprint(path), layers)


def _modules(checkpoint: Checkpoint, shape: Architecture) -> dict[str, str]:
    """Return the adapter's module names in its file, by their names in the model."""
    halves: dict[str, set[str]] = {}
    prefixes: dict[str, str] = {}
    for tensor in checkpoint.unread():
        found = _TENSOR.fullmatch(tensor)
        if found is None or found[3] not in TARGETS:
            raise ConfigError(f"{checkpoint.path}: {tensor} is not supported: this engine adapts {', '.join(TARGETS)}")
        if int(found[2]) >= shape.layers:
            raise ConfigError(f"{checkpoint.path}: {tensor}: the model has {shape.layers} layers")
        halves.setdefault(found[1], set()).add(tensor)
        prefixes[found[1]] = tensor
    if not halves:
        raise ConfigError(f"{checkpoint.path}: the adapter is empty")
    for module, tensors in halves.items():
        if len(tensors) != 2:
            raise ConfigError(f"{checkpoint.path}: {module} contains only {min(tensors)}")
    return {module: re.sub(r"lora_[AB](?=(?:\.default)?\.weight$)", "lora_{}", one) for module, one in prefixes.items()}


class _Scales:
    """Ranks and scales from adapter_config.json."""

    def __init__(self, config: Mapping[str, Any], path: str, rank_max: int) -> None:
        self._config = config
        self._path = path
        self._rank_max = rank_max
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ConfigError(f"{path}: peft_type {kind!r} is not supported: expected LORA")
        for name in REFUSED:
            if config.get(name):
                raise ConfigError(f"{path}: {name} is not supported by the embedded engine")
        if config.get("bias") not in (None, "none"):
            raise ConfigError(f"{path}: bias {config['bias']!r} is not supported by the embedded engine: expected none")
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")

    def check_targets(self, modules: Mapping[str, str]) -> None:
        """Raise `ConfigError` if the modules in the file are not those that the config lists."""
        targets = self._config.get("target_modules")
        if targets is None or targets == ALL_LINEAR:
            return
        if isinstance(targets, str):
            try:
                pattern = re.compile(targets)
            except re.error as error:
                raise ConfigError(f"{self._path}: target_modules is not a valid regular expression: {error}") from None
            unlisted = [module for module in modules if not pattern.fullmatch(module)]
        else:
            named = _texts(targets, f"{self._path}: target_modules")
            unknown = [name for name in named if name.rpartition(".")[2] not in TARGETS]
            if unknown:
                raise ConfigError(
                    f"{self._path}: target_modules {', '.join(unknown)}: this engine adapts {', '.join(TARGETS)}"
                )
            unlisted = [
                module for module in modules if not any(module == one or module.endswith(f".{one}") for one in named)
            ]
        if unlisted:
            raise ConfigError(f"{self._path}: {unlisted[0]} is in the file but not in target_modules")

    def of(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a projection."""
        rank = self._number(self._ranks.get(_key(self._ranks, module)), "r")
        alpha = self._number(self._alphas.get(_key(self._alphas, module)), "lora_alpha")
        if rank != int(rank) or not 1 <= rank <= self._rank_max:
            raise ConfigError(
                f"{self._path}: rank {rank:g} of {module}: expected 1 to --max-lora-rank {self._rank_max}"
            )
        return int(rank), alpha / (rank**0.5 if self._config.get("use_rslora") else rank)

    def _number(self, special: Any, name: str) -> float:
        value = self._config.get(name) if special is None else special
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self._path}: {name} is {value!r}: expected a number")
        return float(value)

    def _pattern(self, name: str) -> dict[str, Any]:
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self._path}: {name} is {value!r}: expected an object")
        return value


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of a module's name; the name itself if none does."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", module)), module)


class _Reader:
    """Reader of one layer of an adapter."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        base: Checkpoint,
        shape: Architecture,
        scales: _Scales,
        modules: Mapping[str, str],
        number: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._base = base
        self._shape = shape
        self._scales = scales
        self._modules = modules
        self._name = f"model.layers.{number}"

    def layer(self) -> LayerDeltas:
        shape = self._shape
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        q, kv = shape.heads * dim, shape.kv_heads * dim
        query = 1.0 if f"{self._name}.self_attn.q_norm.weight" in self._base else dim**-0.5
        return LayerDeltas(
            qkv=self._joined(
                "input_layernorm",
                hidden,
                [
                    self._pair("self_attn.q_proj", q, hidden, factor=query, is_rotated=True),
                    self._pair("self_attn.k_proj", kv, hidden, is_rotated=True),
                    self._pair("self_attn.v_proj", kv, hidden),
                ],
                (q, kv, kv),
            ),
            out=self._joined(None, q, [self._pair("self_attn.o_proj", hidden, q)], (hidden,)),
            gate_up=self._joined(
                "post_attention_layernorm",
                hidden,
                [self._pair("mlp.gate_proj", inner, hidden, factor=0.5), self._pair("mlp.up_proj", inner, hidden)],
                (inner, inner),
            ),
            down=self._joined(None, inner, [self._pair("mlp.down_proj", hidden, inner)], (hidden,)),
        )

    def _pair(
        self, projection: str, outputs: int, inputs: int, *, factor: float = 1.0, is_rotated: bool = False
    ) -> tuple[F32, F32] | None:
        """Return the down and up matrices of a projection; None if the adapter does not change it."""
        module = f"{self._name}.{projection}"
        tensor = self._modules.get(module)
        if tensor is None:
            return None
        rank, scale = self._scales.of(module)
        down = self._checkpoint.tensor(tensor.format("A"), rank, inputs)
        up = self._checkpoint.tensor(tensor.format("B"), outputs, rank) * np.float32(scale * factor)
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise ConfigError(f"{self._checkpoint.path}: {module} has weights that are not finite")
        return down, (interleaved(up, self._shape.head_dim) if is_rotated else up)

    def _joined(
        self, norm: str | None, inputs: int, pairs: Sequence[tuple[F32, F32] | None], sizes: Sequence[int]
    ) -> AdapterDelta | None:
        """Return the term for a matrix that joins these projections and follows a norm."""
        ranks = sum(len(pair[0]) for pair in pairs if pair is not None)
        if ranks == 0:
            return None
        down, up = np.empty((inputs, ranks), np.float32), np.zeros((ranks, sum(sizes)), np.float32)
        rank = column = 0
        for pair, size in zip(pairs, sizes, strict=True):
            if pair is not None:
                until = rank + len(pair[0])
                down[:, rank:until] = pair[0].T
                up[rank:until, column : column + size] = pair[1].T
                rank = until
            column += size
        if norm is not None:
            down *= self._base.tensor(f"{self._name}.{norm}.weight", self._shape.hidden_size)[:, None]
        return AdapterDelta(down, up)


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{what} is {value!r}: expected names, or a regular expression")
    return value


def _fingerprint(path: str) -> int:
    """Return a hash of the adapter's files, independent of their location."""
    digest = xxh3_64()
    for name in (CONFIG, WEIGHTS):
        with open(os.path.join(path, name), "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    return digest.intdigest()
