"""Upstream's compiled module `dynamo._core`: every class and function of its Python bindings, importable from one place.

Nothing is compiled here. The public names of `dynamo.runtime`, `dynamo.llm` and `dynamo.llm.exceptions` are exported.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dynamo.core.errors import ConfigError

PACKAGES = ("dynamo.runtime", "dynamo.llm", "dynamo.llm.exceptions")
ELSEWHERE = {
    "AsyncResponseStream": ("dynamo.runtime.streams", "ResponseStream"),
    "ContextMetadata": ("dynamo.runtime.context", "ContextMetadata"),
    "EngineConfig": ("dynamo.llm.entrypoint", "EngineSetup"),
    "FirstTokenSource": ("dynamo.runtime.component", "FirstTokenSource"),
    "Instance": ("dynamo.protocols.discovery", "Instance"),
    "ModelDeploymentCard": ("dynamo.llm.deployment_card", "DeploymentCard"),
    "PlannerDecision": ("dynamo.llm.virtual_connector", "PlannerDecision"),
    "ReasoningConfig": ("dynamo.llm.perf_config", "ReasoningConfig"),
    "ResponseSender": ("dynamo.llm.protocols", "ResponseSender"),
    "RuntimeMetrics": ("dynamo.runtime.component", "EndpointExposition"),
    "SpanProxy": ("dynamo.runtime.context", "SpanProxy"),
    "TransportType": ("dynamo.protocols.discovery", "TransportAddress"),
    "VirtualConnectorClient": ("dynamo.llm.virtual_connector", "VirtualConnectorClient"),
    "VirtualConnectorCoordinator": ("dynamo.llm.virtual_connector", "VirtualConnectorCoordinator"),
    "__version__": ("dynamo", "__version__"),
    "get_reasoning_parser_names": ("dynamo.parsers.registry", "reasoning_names"),
    "get_tool_parser_names": ("dynamo.parsers.registry", "tool_call_names"),
    "log_message": ("dynamo.core.logging", "log_message"),
    "resolve_routing_image_token_id": ("dynamo.text.multimodal.image_tokens", "resolve_routing_image_token_id"),
    "run_mocker_synthetic_trace_replay": ("dynamo.replay.bindings", "run_mocker_synthetic_trace_replay"),
    "run_mocker_trace_replay": ("dynamo.replay.bindings", "run_mocker_trace_replay"),
}
"""Upstream's names of objects with another name, or no public one, here."""
SERVICES = {
    "run_kv_indexer": "dynamo.indexer.main",
    "run_select_service": "dynamo.select_service.main",
    "run_slot_tracker": "dynamo.slot_tracker.main",
}
"""Commands that programs for upstream call with their arguments."""


def _service(address: str) -> Callable[[Sequence[str] | None], None]:
    def run(argv: Sequence[str] | None = None) -> None:
        """Run the service until it is stopped; `argv` defaults to the command line. Exit the program for invalid ones."""
        main: Callable[[Sequence[str] | None], int] = importlib.import_module(address).main
        try:
            main(argv)
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return run


def __getattr__(name: str) -> Any:
    if name == "backend":
        return importlib.import_module(f"{__name__}.{name}")
    if name in ELSEWHERE:
        address, actual = ELSEWHERE[name]
        return getattr(importlib.import_module(address), actual)
    if name in SERVICES:
        return _service(SERVICES[name])
    for package in map(importlib.import_module, PACKAGES):
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    return sorted({*globals(), *names, *ELSEWHERE, *SERVICES, "backend"})
