"""Worker and its configuration, for programs that serve an engine of the unified backend SDK."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from dynamo.common.backend import bindings
from dynamo.common.backend.bound_worker import Worker as BoundWorker
from dynamo.common.backend.engine import BaseEngine, RawEngine
from dynamo.common.backend.health_check import parse_health_check_payload_cli
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.media_options import MediaDecoder, MediaFetcher
from dynamo.model_card.types import ModelInput

_DISAGG_MODE_TO_RUST = {mode: bindings.DisaggregationMode[mode.name.capitalize()] for mode in DisaggregationMode}


@dataclass
class WorkerConfig:
    """Configuration of a worker."""

    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    """Directory in Hugging Face layout or id on the hub, whose files the model's card describes."""
    served_model_name: str | None = None
    """Name of the model for clients, unless the engine reports one."""
    model_input: ModelInput = field(default_factory=lambda: ModelInput.Tokens)
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    use_kv_events: bool = False
    """Has no effect: `enable_kv_routing` and the engine's sources decide."""
    custom_jinja_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_local_indexer: bool = True
    enable_kv_routing: bool = True
    """Whether KV events and the load of ranks are published."""
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None
    """Request of the health check; None: that of the engine."""
    structural_tag: dict[str, object] | None = None
    route_to_encoder: bool = False
    """Whether the model requires an encode worker. For aggregated and prefill workers."""
    media_decoder: MediaDecoder | None = None
    media_fetcher: MediaFetcher | None = None
    kv_state_endpoint: str | None = None
    default_thinking_mode: str | None = None
    response_plane: str = "tcp"

    @classmethod
    def from_runtime_config(
        cls,
        runtime_cfg: Any,
        model_name: str,
        served_model_name: str | None = None,
        model_input: ModelInput | None = None,
        **overrides: Any,
    ) -> Self:
        """Return the configuration in parsed flags of a worker; `overrides` replace them.

        Raise `TypeError` for a `disaggregation_mode` of another type.
        """
        given: dict[str, Any] = {
            name: getattr(runtime_cfg, name)
            for name in ("namespace", "discovery_backend", "request_plane", "event_plane")
        }
        given |= {name: getattr(runtime_cfg, source, default) for name, source, default in _FROM_FLAGS}
        given["component"] = getattr(runtime_cfg, "component", None) or "backend"
        given["endpoint"] = getattr(runtime_cfg, "endpoint", None) or "generate"
        mode = getattr(runtime_cfg, "disaggregation_mode", None)
        given["disaggregation_mode"] = _coerce_disagg_mode(
            getattr(runtime_cfg, "serving_mode", None) if mode is None else mode
        )
        given["health_check_payload"] = parse_health_check_payload_cli(_text(runtime_cfg, "health_check_payload"))
        if model_input is not None:
            given["model_input"] = model_input
        return cls(**{"model_name": model_name, "served_model_name": served_model_name, **given, **overrides})


_FROM_FLAGS = (
    ("endpoint_types", "endpoint_types", "chat,completions"),
    ("use_kv_events", "use_kv_events", False),
    ("custom_jinja_template", "custom_jinja_template", None),
    ("tool_call_parser", "dyn_tool_call_parser", None),
    ("reasoning_parser", "dyn_reasoning_parser", None),
    ("default_thinking_mode", "dyn_default_thinking_mode", None),
    ("exclude_tools_when_tool_choice_none", "exclude_tools_when_tool_choice_none", True),
    ("enable_local_indexer", "enable_local_indexer", True),
    ("enable_kv_routing", "enable_kv_routing", True),
    ("structural_tag", "structural_tag", None),
    ("route_to_encoder", "route_to_encoder", False),
    ("kv_state_endpoint", "kv_state_endpoint", None),
    ("response_plane", "response_plane", "tcp"),
)
"""Fields of a worker's configuration, the attributes of the parsed flags, and their defaults."""


class Worker:
    """A worker that serves an engine until a signal."""

    def __init__(self, engine: BaseEngine, config: WorkerConfig) -> None:
        self.engine = engine
        self.config = config

    async def run(self) -> None:
        """Start the engine, register the model, serve, and clean up.

        Raise `TypeError`, `ValueError` and `InvalidArgument` for the configuration, and the engine's error if it fails.
        """
        is_raw = isinstance(self.engine, RawEngine)
        await BoundWorker(self.engine, bound_config(self.config), asyncio.get_running_loop(), raw=is_raw).run()


def bound_config(config: WorkerConfig) -> bindings.WorkerConfig:
    """Return the configuration with checked values. Raise `TypeError` and `ValueError`."""
    return bindings.WorkerConfig(
        namespace=config.namespace,
        component=config.component,
        endpoint=config.endpoint,
        model_name=config.model_name,
        served_model_name=config.served_model_name,
        model_input=config.model_input,
        endpoint_types=config.endpoint_types,
        custom_jinja_template=config.custom_jinja_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        exclude_tools_when_tool_choice_none=config.exclude_tools_when_tool_choice_none,
        enable_local_indexer=config.enable_local_indexer,
        enable_kv_routing=config.enable_kv_routing,
        metrics_labels=config.metrics_labels,
        runtime=bindings.RuntimeConfig(
            config.discovery_backend, config.request_plane, config.event_plane, response_plane=config.response_plane
        ),
        disaggregation_mode=_to_rust_disaggregation_mode(config.disaggregation_mode),
        health_check_payload=config.health_check_payload,
        structural_tag=config.structural_tag,
        route_to_encoder=config.route_to_encoder,
        media_decoder=config.media_decoder,
        media_fetcher=config.media_fetcher,
        kv_state_endpoint=config.kv_state_endpoint,
        default_thinking_mode=config.default_thinking_mode,
    )


def _text(flags: Any, name: str) -> str | None:
    value = getattr(flags, name, None)
    return value if isinstance(value, str) else None


def _coerce_disagg_mode(value: Any) -> DisaggregationMode:
    """Return the mode of the same name; None is aggregated. Raise `TypeError` for another value."""
    name = DisaggregationMode.AGGREGATED.name if value is None else value.name if isinstance(value, Enum) else ""
    found = DisaggregationMode.__members__.get(name)
    if found is None:
        raise TypeError(f"disaggregation_mode {value!r}: must be a dynamo.common.constants.DisaggregationMode")
    return found


def _to_rust_disaggregation_mode(mode: DisaggregationMode) -> bindings.DisaggregationMode:
    return _DISAGG_MODE_TO_RUST[mode]
