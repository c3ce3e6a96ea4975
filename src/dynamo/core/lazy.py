"""Lazy names: a package's public names, whose modules are imported on first access."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], older: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`.

    `modules` maps each name to its module; `older` maps former names to current ones.
    """
    spellings = {name: name for name in modules} | dict(older or {})

    def get(name: str) -> Any:
        actual = spellings.get(name)
        if actual is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[actual]), actual)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *spellings})

    return list(spellings), get, names
