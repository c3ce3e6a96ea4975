"""Deferred modules: stand-ins for modules that libraries import at their start and use rarely.

`starlette.exceptions` imports `http.client` for the texts of the statuses, and with it the parser of mails; `uvicorn.config`
imports `logging.config`, and with it configuration files and socket servers. A stand-in takes the place of such a module
while the libraries are imported, and imports the module when an attribute of it is first read.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """Has the attributes of the module of its name, which it imports when the first is read. Thread-safe."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported(), name)

    def __dir__(self) -> list[str]:
        return dir(self._imported())

    def _imported(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)
        return importlib.import_module(self.__name__)


@contextmanager
def deferred(names: Sequence[str]) -> Iterator[None]:
    """Let an import of these modules, unless they are already imported, return a stand-in within this block.

    Code imported within it keeps the stand-in; later imports find the module itself. Statements such as
    `from http.client import HTTPConnection` read an attribute and import the module at once.
    """
    placed = []
    for name in names:
        if name in sys.modules:
            continue
        stand_in = sys.modules[name] = StandIn(name)
        placed.append(stand_in)
        package, _, own = name.rpartition(".")
        if package:  # `http.client` is also read as an attribute of `http`; the import of the module sets it again.
            holder = importlib.import_module(package)
            if sys.modules.get(name) is stand_in:
                setattr(holder, own, stand_in)
    try:
        yield
    finally:
        for stand_in in placed:
            if sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]
