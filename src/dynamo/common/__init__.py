"""Helpers that engines and components for upstream import: options, configuration dump, metrics, media and utilities.

Optional packages (pydantic, fsspec, aiohttp, torch, Pillow) are imported where they are used; without one of them the
operation that needs it raises an ImportError that names it.
"""

from importlib import import_module
from types import ModuleType

from dynamo import __version__

__all__ = ["__version__", "config_dump", "constants", "snapshot", "utils"]

LAZY = frozenset({"config_dump", "constants", "snapshot", "utils"})


def __getattr__(name: str) -> ModuleType:
    if name in LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
