"""Worker of `dynamo._core.backend`: serves an engine of the SDK with the worker of `dynamo.backend`."""

import asyncio
import json
from dataclasses import fields
from typing import Any, NoReturn

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.process import WorkerProcess
from dynamo.common.backend.bindings import RuntimeConfig, WorkerConfig
from dynamo.common.backend.served_engine import ServedEngine, check_kind
from dynamo.core.config import load, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.runtime.config import RuntimeOptions


class Worker:
    """A worker with one engine on an event loop; `raw` for an engine of media instead of tokens."""

    def __init__(self, engine: Any, config: WorkerConfig, event_loop: Any, raw: bool = False) -> None:
        if not isinstance(config, WorkerConfig):
            raise TypeError(f"config: must be WorkerConfig, not {type(config).__name__}")
        self._engine = engine
        self._config = config
        self._loop = event_loop
        self._is_raw = raw

    async def run(self) -> None:
        """Start the engine, register the model and serve until a signal; then drain and clean up.

        Raise `InvalidArgument` for an unsuitable configuration, and the engine's error if it fails.
        """
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("Worker.run: must be awaited on the event loop that was given to the worker")
        config, is_raw = self._config, self._is_raw
        check_kind(config, is_raw=is_raw)
        process = WorkerProcess(
            worker_options(config), lambda: ServedEngine(self._engine, config, is_raw=is_raw), 1, lambda _index: 0.0
        )
        await process.live()
        if process.failure is not None:
            raise process.failure


def worker_options(config: WorkerConfig) -> DisaggregatedOptions:
    """Return the worker's options: those of `config`, transports without one as in the environment."""
    runtime = config.runtime or RuntimeConfig()
    defaults = load(RuntimeOptions, [])
    common = {one.name: getattr(defaults, one.name) for one in fields(RuntimeOptions)}
    common |= {one.name: value for one in fields(RuntimeConfig) if (value := getattr(runtime, one.name)) is not None}
    tag = config.structural_tag
    limit = setting("DYN_ENGINE_REQUEST_LIMIT", 0, int)
    return DisaggregatedOptions(
        **common,
        namespace=config.namespace,
        endpoint=f"dyn://{config.namespace}.{config.component}.{config.endpoint}",
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        default_thinking_mode=config.default_thinking_mode,
        exclude_tools_when_tool_choice_none=config.exclude_tools_when_tool_choice_none,
        structural_tag=None if tag is None else json.dumps({"scope": "auto", **tag}),
        custom_jinja_template=config.custom_jinja_template,
        disaggregation_mode=DisaggregationMode[config.disaggregation_mode.name.upper()].value,
        durable_kv_events=setting("DYN_DURABLE_KV_EVENTS", False, read_bool),
        engine_request_limit=limit or None,
    )


def run_vllm_sidecar(argv: list[str] | None = None) -> NoReturn:
    """Raise `ConfigError`: sidecars are programs of upstream's compiled package."""
    _no_sidecar("vllm")


def run_sglang_sidecar(argv: list[str] | None = None) -> NoReturn:
    """Raise `ConfigError`: sidecars are programs of upstream's compiled package."""
    _no_sidecar("sglang")


def run_trtllm_sidecar(argv: list[str] | None = None) -> NoReturn:
    """Raise `ConfigError`: sidecars are programs of upstream's compiled package."""
    _no_sidecar("trtllm")


def _no_sidecar(engine: str) -> NoReturn:
    raise ConfigError(f"the {engine} sidecar is part of upstream's compiled package; start python -m dynamo.{engine}")
