"""A lazy name is equivalent to its target, and costs nothing before its first use."""

import sys
from types import ModuleType

import pytest

from dynamo.core.lazy import lazy_names


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("somewhere")
    monkeypatch.setitem(sys.modules, "somewhere", made)
    names, made.__getattr__, made.__dir__ = lazy_names(  # type: ignore[method-assign]
        "somewhere", {"OrderedDict": "collections", "nothing": "no.such.module"}, {"Ordered": "OrderedDict"}
    )
    assert names == ["OrderedDict", "nothing", "Ordered"]
    return made


def test_lazy_module_loads_a_name_on_first_use(package: ModuleType) -> None:
    import collections

    assert package.OrderedDict is package.Ordered is collections.OrderedDict
    with pytest.raises(ModuleNotFoundError):
        _ = package.nothing


def test_lazy_module_reports_an_unknown_name_with_its_package(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'somewhere' has no attribute 'other'"):
        _ = package.other


def test_lazy_module_lists_lazy_and_own_names(package: ModuleType) -> None:
    package.own = 1  # type: ignore[attr-defined]
    assert {"own", "OrderedDict", "Ordered", "nothing", "__name__"} <= set(dir(package))
