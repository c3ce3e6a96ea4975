"""Records of `dynamo._core.backend`: configuration of a worker and registration of an engine, checked when created."""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.common.configuration.groups.runtime_args import StructuralTagConfig
from dynamo.llm.media_options import MediaDecoder, MediaFetcher
from dynamo.model_card.types import ModelInput

U16, U32, U64 = 1 << 16, 1 << 32, 1 << 64


class DisaggregationMode(enum.Enum):
    """Phases that a worker computes."""

    Aggregated = 1
    Prefill = 2
    Decode = 3
    Encode = 4

    def __int__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class LlmRegistration:
    """Properties of an engine for tokens. Raise `TypeError` and `OverflowError` for an invalid number."""

    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    enable_eagle: bool = False
    max_gpu_lora_count: int | None = None

    def __post_init__(self) -> None:
        for name in ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"):
            _check_number(name, getattr(self, name), U64)
        for name in (
            "context_length",
            "kv_cache_block_size",
            "data_parallel_size",
            "data_parallel_start_rank",
            "max_gpu_lora_count",
        ):
            _check_number(name, getattr(self, name), U32)
        _check_number("bootstrap_port", self.bootstrap_port, U16)
        _check("bootstrap_host", self.bootstrap_host, str, is_optional=True)


@dataclass(frozen=True)
class EngineConfig:
    """Properties of a loaded engine. Raise `TypeError` for a value of the wrong type."""

    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] = None  # type: ignore[assignment]  # None is replaced by an empty dictionary.
    llm: LlmRegistration | None = None
    model_aliases: list[str] = None  # type: ignore[assignment]  # None is replaced by an empty list.

    def __post_init__(self) -> None:
        _check("model", self.model, str)
        _check("served_model_name", self.served_model_name, str, is_optional=True)
        _check("runtime_data", self.runtime_data, dict, is_optional=True)
        _check("llm", self.llm, LlmRegistration, is_optional=True)
        _check("model_aliases", self.model_aliases, list, is_optional=True)
        data = json.loads(json.dumps(self.runtime_data or {}))
        object.__setattr__(self, "runtime_data", data)
        object.__setattr__(self, "model_aliases", list(self.model_aliases or ()))


@dataclass(frozen=True)
class RuntimeConfig:
    """Discovery and transports of a worker; None: those of the environment."""

    discovery_backend: str | None = None
    request_plane: str | None = None
    event_plane: str | None = None
    response_plane: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of a worker. Raise `TypeError` and `ValueError` for an invalid value."""

    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    model_input: ModelInput = ModelInput.Tokens
    endpoint_types: str = "chat,completions"
    custom_jinja_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_local_indexer: bool = True
    enable_kv_routing: bool = True
    metrics_labels: Sequence[tuple[str, str]] = ()
    runtime: RuntimeConfig | None = None
    disaggregation_mode: DisaggregationMode = DisaggregationMode.Aggregated
    health_check_payload: dict[str, Any] | None = None
    structural_tag: dict[str, Any] | None = None
    route_to_encoder: bool = False
    media_decoder: MediaDecoder | None = None
    media_fetcher: MediaFetcher | None = None
    kv_state_endpoint: str | None = None
    default_thinking_mode: str | None = None

    def __post_init__(self) -> None:
        for name in ("namespace", "component", "endpoint", "model_name", "endpoint_types"):
            _check(name, getattr(self, name), str)
        for name in (
            "served_model_name",
            "custom_jinja_template",
            "tool_call_parser",
            "reasoning_parser",
            "kv_state_endpoint",
            "default_thinking_mode",
        ):
            _check(name, getattr(self, name), str, is_optional=True)
        _check("model_input", self.model_input, ModelInput)
        _check("runtime", self.runtime, RuntimeConfig, is_optional=True)
        _check("disaggregation_mode", self.disaggregation_mode, DisaggregationMode)
        _check("structural_tag", self.structural_tag, dict, is_optional=True)
        _check("media_decoder", self.media_decoder, MediaDecoder, is_optional=True)
        _check("media_fetcher", self.media_fetcher, MediaFetcher, is_optional=True)
        self._check_content()

    def _check_content(self) -> None:
        if isinstance(self.metrics_labels, dict | str):
            raise TypeError(f"metrics_labels: must be a list of pairs, not {type(self.metrics_labels).__name__}")
        if any(len(pair) != 2 for pair in self.metrics_labels):
            raise ValueError(f"metrics_labels {self.metrics_labels!r}: must be a list of pairs")
        if self.health_check_payload is not None:
            if not isinstance(self.health_check_payload, dict):
                raise ValueError("health_check_payload must be a JSON object (dict)")
            try:
                json.dumps(self.health_check_payload)
            except TypeError as error:
                raise ValueError(f"health_check_payload must be JSON: {error}") from None
        if self.structural_tag is not None:
            try:
                msgspec.convert(self.structural_tag, StructuralTagConfig)
            except msgspec.ValidationError as error:
                raise ValueError(f"structural_tag: {error}") from None


def _check(name: str, value: Any, kind: type, *, is_optional: bool = False) -> None:
    if not isinstance(value, kind) and not (value is None and is_optional):
        raise TypeError(f"{name}: must be {kind.__name__}, not {type(value).__name__}")


def _check_number(name: str, value: Any, limit: int) -> None:
    if value is None:
        return
    _check(name, value, int)
    if not 0 <= value < limit:
        raise OverflowError(f"{name} {value}: must be 0 to {limit - 1}")
