"""A stand-in has the attributes of its module, which is imported when the first of them is read."""

import importlib
import sys
from pathlib import Path

import pytest

from dynamo.core.deferred_modules import StandIn, deferred


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a package with the module `rare` and modules that import it, each in another way; return its name."""
    name = "package_of_deferred_modules"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rare.py").write_text("VALUE = 7\n")
    (folder / "by_name.py").write_text(f"import {name}.rare\ndef read(): return {name}.rare.VALUE\n")
    (folder / "relative.py").write_text("from . import rare\ndef read(): return rare.VALUE\n")
    (folder / "at_once.py").write_text("from .rare import VALUE\ndef read(): return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    for own in ("", ".rare", ".by_name", ".relative", ".at_once"):
        sys.modules.pop(f"{name}{own}", None)  # Of the previous test, in another directory.
    return name


@pytest.mark.parametrize("user", ["by_name", "relative"])
def test_module_is_imported_when_an_attribute_is_first_read(package: str, user: str) -> None:
    rare = f"{package}.rare"
    with deferred([rare]):
        read = importlib.import_module(f"{package}.{user}").read
        assert isinstance(sys.modules[rare], StandIn)
    assert rare not in sys.modules
    assert read() == 7
    assert not isinstance(sys.modules[rare], StandIn)


def test_module_whose_attribute_is_imported_is_imported_at_once(package: str) -> None:
    rare = f"{package}.rare"
    with deferred([rare]):
        assert importlib.import_module(f"{package}.at_once").read() == 7
        assert not isinstance(sys.modules[rare], StandIn)
    assert not isinstance(importlib.import_module(rare), StandIn)


def test_import_after_the_block_returns_the_module(package: str) -> None:
    rare = f"{package}.rare"
    with deferred([rare]):
        read = importlib.import_module(f"{package}.by_name").read
    module = importlib.import_module(rare)
    assert not isinstance(module, StandIn)
    module.VALUE = 8  # type: ignore[attr-defined]
    assert read() == 8
    assert sys.modules[package].rare is module


def test_imported_module_keeps_its_place(package: str) -> None:
    rare = f"{package}.rare"
    module = importlib.import_module(rare)
    with deferred([rare]):
        assert importlib.import_module(rare) is module
    assert sys.modules[rare] is module


def test_stand_in_reports_a_missing_attribute_and_lists_those_of_its_module(package: str) -> None:
    with deferred([f"{package}.rare"]):
        stand_in = importlib.import_module(f"{package}.rare")
    with pytest.raises(AttributeError, match="ABSENT"):
        _ = stand_in.ABSENT
    assert "VALUE" in dir(stand_in)
