"""Private parts of libraries are used only where they are listed, and those libraries have an upper bound."""

import ast
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from tests.house.source import MODULES, ROOT, tree

USES = {
    "argparse": {
        "_action_groups",
        "_actions",
        "_get_formatter",
        "_group_actions",
        "_mutually_exclusive_groups",
        "_option_string_actions",
        "_print_message",
        "_registry_get",
    },
    "nats-py": {"_io_writer", "_pending_data_size", "_ps", "_reading_task"},
    "nixl": {"nixl._api"},
    "numpy": {"_umath_linalg"},
    "opentelemetry-sdk": {"opentelemetry._logs", "opentelemetry.sdk._logs", "opentelemetry.sdk._logs.export"},
    "sglang": {"_scheduler_init_result"},
    "tensorrt-llm": {"_check_health", "_collective_rpc"},
    "uvicorn": {"_unset_keepalive_if_required"},
    "vllm": {"_get_connector_metadata"},
}
UNBOUNDED = {
    "argparse": "in the standard library",
    "nixl": "documented under this name",
    "numpy": "only its file is used; without it, a prefill uses one thread and those of OpenBLAS",
    "vllm": "protected: for subclasses of its connector",
}
"""Libraries without an upper bound, with the reason."""
DOCUMENTED = {"_exit"}
"""Names that only look private: `os._exit`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> Iterator[str]:
    """Return the names that the modules define: functions, classes, variables and attributes."""
    for node in (node for one in trees for node in ast.walk(one)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private_uses(trees: list[ast.Module]) -> set[str]:
    """Yield private names that the modules use and do not define, and private modules that they import."""
    own = set(own_names(trees)) | DOCUMENTED
    found: set[str] = set()
    for node in (node for one in trees for node in ast.walk(one)):
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if any(map(is_private, module.split("."))):
                found.update([module] if not module.startswith("dynamo") else [])
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("dynamo"):
                found.update(one.name for one in names)
    return {name for name in found if name not in own and any(map(is_private, name.split(".")))}


def test_private_parts_of_libraries_are_used_only_where_listed() -> None:
    trees = [tree(path) for path in MODULES]
    assert private_uses(trees) == set().union(*USES.values())


@pytest.mark.parametrize("library", sorted(USES.keys() - UNBOUNDED))
def test_library_with_private_parts_in_use_has_an_upper_bound(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    found = [one for one in map(Requirement, lines) if one.name == library]
    assert found
    assert [str(one) for one in found if not any(bound.operator == "<" for bound in one.specifier)] == []


def test_private_uses_are_found() -> None:
    source = "from a._b import c\nclass D:\n    def f(self):\n        self._own = 1\n        self._own.x._theirs"
    assert private_uses([ast.parse(source)]) == {"a._b", "_theirs"}
