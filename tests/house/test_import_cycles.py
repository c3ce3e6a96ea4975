"""No module imports itself by way of others, at import time or in a function; imports for type checkers do not count."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.source import MODULES, SOURCE, tree


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield every statement of a block and of nested blocks, except those of `if TYPE_CHECKING:`."""
    for statement in body:
        yield statement
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"):
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)


def imported(tree: ast.Module) -> Iterator[str]:
    for statement in statements(tree.body):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle; empty if there is none."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return []


def test_modules_have_no_import_cycles() -> None:
    trees = {module_name(path): tree(path) for path in MODULES}
    graph = {name: {one for one in imported(module) if one in trees and one != name} for name, module in trees.items()}
    assert cycle(graph) == []


def test_cycles_are_found() -> None:
    source = "def f():\n    try:\n        from a.b import c\n    except ImportError:\n        import d\nif TYPE_CHECKING:\n    import e"
    assert set(imported(ast.parse(source))) == {"a.b", "a.b.c", "d"}
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle({"a": {"b"}, "b": {"a"}})) == {"a", "b"}
