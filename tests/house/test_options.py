"""No flag is accepted silently: the code reads its value, or its help states that it has no effect."""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from tests.house.source import MODULES, SOURCE, tree

from dynamo.core.config import NO_EFFECT

SHARED = frozenset(
    {
        "api",
        "backend",
        "core",
        "grpc",
        "http",
        "kv_events",
        "kv_router",
        "kvbm",
        "llm",
        "model_card",
        "parsers",
        "protocols",
    }
    | {"routing", "runtime", "serving", "text", "tokens"}
)
"""Packages that read the options of the commands above them."""
ABOVE = frozenset({"cli", "replay"})
"""Packages that read the options of the commands below them."""
READ_AS_A_WHOLE = {"AdvertisedOptions"}
"""Classes whose methods go through all their fields."""


class Declared(NamedTuple):
    """A field made by `option()`."""

    package: str
    owner: str
    name: str
    flag: str
    help: str
    has_one_value: bool
    """Whether `choices` leaves nothing to choose."""


class Reads(ast.NodeVisitor):
    """Attributes that a module reads, except those that it only checks: `if …: raise …`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        if all(isinstance(step, ast.Raise) for step in node.body):
            for step in node.orelse:
                self.visit(step)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.attr)
        self.generic_visit(node)


@cache
def trees() -> dict[str, list[ast.Module]]:
    """The modules of each package."""
    found: dict[str, list[ast.Module]] = {}
    for path in MODULES:
        package = path.relative_to(SOURCE).parts[0]
        found.setdefault(package, []).append(tree(path))
    return found


@cache
def read_by(package: str) -> frozenset[str]:
    reads = Reads()
    for module in trees()[package]:
        reads.visit(module)
    return frozenset(reads.names)


def text_of(node: ast.expr | None) -> str:
    """A text, with `NO_EFFECT` in place of its name."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return NO_EFFECT if isinstance(node.value, ast.Name) and node.value.id == "NO_EFFECT" else ""
    return ""


def read_as(call: ast.Call, name: str) -> str:
    """The attribute that the code reads: for a router setting, the configuration's field that it sets."""
    for word in call.keywords:
        if word.arg == "extra" and isinstance(word.value, ast.Call) and word.value.args:
            return text_of(word.value.args[0]).rpartition(".")[2]
    return name


def declared() -> Iterator[Declared]:
    for package, modules in trees().items():
        for module in modules:
            for owner in ast.walk(module):
                if not isinstance(owner, ast.ClassDef):
                    continue
                for field in owner.body:
                    call = field.value if isinstance(field, ast.AnnAssign) else None
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "option":
                        assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                        choices = [word.value for word in call.keywords if word.arg == "choices"]
                        has_one = any(isinstance(one, ast.List | ast.Tuple) and len(one.elts) == 1 for one in choices)
                        flag, text = text_of(call.args[1]), text_of(call.args[3])
                        yield Declared(package, owner.name, read_as(call, field.target.id), flag, text, has_one)


OPTIONS = list(declared())


def is_read(one: Declared) -> bool:
    packages = trees().keys() if one.package in SHARED else SHARED | ABOVE | {one.package}
    return any(one.name in read_by(package) for package in packages)


def test_options_are_found() -> None:
    assert len(OPTIONS) > 350
    assert any(one.flag == "--router-event-threads" for one in OPTIONS)


@pytest.mark.parametrize("package", sorted({one.package for one in OPTIONS}))
def test_every_flag_is_read_or_documented_as_without_effect(package: str) -> None:
    silent = [
        f"{one.owner}.{one.name} ({one.flag})"
        for one in OPTIONS
        if one.package == package
        and one.owner not in READ_AS_A_WHOLE
        and not one.has_one_value
        and not one.help.startswith(NO_EFFECT)
        and not is_read(one)
    ]
    assert not silent, f"read them, or begin their help with {NO_EFFECT!r}"
