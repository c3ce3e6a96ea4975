"""The parts of uvicorn that servers use, imported without its command line.

Importing any module of uvicorn imports `uvicorn.main` too: its command line, with click, multiprocessing, and the supervisors
of several processes, which are more modules than the server itself. A server here has its own processes and options, so an
empty module takes the place of `uvicorn.main` during the import. Afterwards `uvicorn.main` can be imported as usual, and the
names that the package takes from it are looked up on first access.

Import uvicorn's classes from here, never from uvicorn.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

COMMAND_LINE = "uvicorn.main"
COMMAND_NAMES = ("Server", "main", "run")
"""Names that the package `uvicorn` takes from its command line."""


def import_without_command_line() -> None:
    """Import uvicorn with an empty command line, unless it is already imported."""
    if "uvicorn" in sys.modules:
        return
    empty = ModuleType(COMMAND_LINE)
    for name in COMMAND_NAMES:
        setattr(empty, name, None)
    sys.modules[COMMAND_LINE] = empty
    try:
        package = importlib.import_module("uvicorn")
    finally:
        del sys.modules[COMMAND_LINE]
    for name in COMMAND_NAMES:
        delattr(package, name)

    def look_up(name: str) -> Any:
        if name not in COMMAND_NAMES:
            raise AttributeError(f"module 'uvicorn' has no attribute {name!r}")
        line = importlib.import_module(COMMAND_LINE)
        for one in COMMAND_NAMES:  # All: the import has set `main` to the module, and in the package it is a function.
            setattr(package, one, getattr(line, one))
        return getattr(package, name)

    package.__getattr__ = look_up  # type: ignore[method-assign]


import_without_command_line()

from uvicorn.config import Config  # noqa: E402 - after the import without the command line
from uvicorn.protocols.http.flow_control import FlowControl  # noqa: E402
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

__all__ = ["STATUS_LINE", "Config", "FlowControl", "HttpToolsProtocol", "ServerState"]
