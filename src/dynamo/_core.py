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
    "Instance": ("dynamo.protocols.discovery", "Instance"),
    "ModelDeploymentCard": ("dynamo.protocols.model_card", "ModelDeploymentCard"),
    "PyAsyncRequestStream": ("dynamo.runtime.streams", "RequestStream"),
    "RuntimeMetrics": ("dynamo.runtime.component", "EndpointExposition"),
    "SpanProxy": ("dynamo.runtime.context", "SpanProxy"),
    "TransportType": ("dynamo.protocols.discovery", "TransportAddress"),
    "get_reasoning_parser_names": ("dynamo.parsers.registry", "reasoning_names"),
    "get_tool_parser_names": ("dynamo.parsers.registry", "tool_call_names"),
}
"""Upstream's names of objects with another name, or no public one, here."""
SERVICES = {
    "run_kv_indexer": "dynamo.indexer.main",
    "run_select_service": "dynamo.select_service.main",
    "run_slot_tracker": "dynamo.slot_tracker.main",
}
"""Commands that programs for upstream call with their arguments."""


def _service(address: str) -> Callable[[Sequence[str]], None]:
    def run(args: Sequence[str]) -> None:
        """Run the service with these arguments until it is stopped. Exit the program if they are invalid."""
        main: Callable[[Sequence[str]], int] = importlib.import_module(address).main
        try:
            main(args)
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(2) from None

    return run


def __getattr__(name: str) -> Any:
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
    return sorted({*globals(), *names, *ELSEWHERE, *SERVICES})
