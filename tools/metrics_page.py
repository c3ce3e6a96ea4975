"""Write every metric into docs/reference/metrics.md: name, type, labels, help and the package that registers it.

The metrics come from the code. Each function that registers families (`registry.counter(…)`, `gauge`, `histogram`) is executed
statement by statement with a recorder in place of the registry and stubs in place of its other arguments. Statements that need real
arguments fail and are skipped. `missed()` returns the registrations that were not recorded; a test requires that there are none.
"""

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tools.absent_metrics import (
    ABSENT,
    ABSENT_WITH_KV_ROUTER,
    ABSENT_WITHOUT_KV_ROUTER,
    ABSENT_WITHOUT_REPLICA_SYNC,
)
from tools.pages import REFERENCE, ROOT, cell, code, table, write

PAGE = REFERENCE / "metrics.md"
SOURCE = ROOT / "src"
KINDS = ("counter", "gauge", "histogram")
REGISTRIES = {"registry", "_registry", "metrics"}
"""Names of variables and attributes that hold a registry."""
PREFIX = "dynamo_frontend"
HEAD = """# Metrics

Every metric family in Prometheus form, by the package that registers it. The frontend and the routing services serve `/metrics` on
their own ports, workers on the system port (`DYN_SYSTEM_PORT`), the KV block manager on `DYN_KVBM_METRICS_PORT`.
`--metrics-prefix` replaces `dynamo_frontend`. Workers of vLLM, SGLang and TensorRT-LLM add the metrics of their engines. Written by
`tools/metrics_page.py` from the code; `make references` updates it. [Observability](../observability.md) explains how to use them.
"""

ABSENT_HEAD = """## Metrics of the released frontend that this one does not have

Names without the suffix `_total`. `tests/conformance` compares the names, types and labels of both frontends.
"""
ABSENT_METRICS = {
    "In every router mode": ABSENT,
    "Without a KV router": ABSENT_WITHOUT_KV_ROUTER,
    "With a KV router": ABSENT_WITH_KV_ROUTER,
    "Without router replicas": ABSENT_WITHOUT_REPLICA_SYNC,
}


@dataclass(frozen=True, slots=True, order=True)
class Metric:
    """One metric family."""

    package: str
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Stub(MagicMock):
    """A mock that is no path: code that creates directories fails instead of creating one in the working directory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.__fspath__


@dataclass(slots=True)
class Recorder:
    """A registry that records the families which are registered, and the places in the source where that happens."""

    package: str
    metrics: set[Metric] = field(default_factory=set)
    places: set[tuple[str, int]] = field(default_factory=set)

    def __getattr__(self, kind: str) -> Any:
        if kind not in KINDS:
            raise AttributeError(kind)

        def register(name: str, help: str, labels: Any = (), buckets: Any = ()) -> Stub:
            frame = inspect.currentframe()
            while frame is not None and "tools" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None:
                self.places.add((frame.f_code.co_filename, frame.f_lineno))
            self.metrics.add(Metric(self.package, name, kind, tuple(labels), help))
            return Stub()

        return register


def main() -> int:
    """Rewrite the page."""
    return write(PAGE, content())


def content() -> str:
    """Return the page."""
    found, _ = recorded()
    parts = [HEAD]
    for package in sorted({one.package for one in found}):
        rows = [
            (code(one.name), one.kind, ", ".join(map(code, one.labels)), cell(one.help))
            for one in sorted(found)
            if one.package == package
        ]
        parts.append(f"## `dynamo.{package}`\n\n" + table(("metric", "type", "labels", ""), rows))
    parts.append(ABSENT_HEAD)
    for title, absent in ABSENT_METRICS.items():
        rows = [(code(name), cell(reason)) for name, reason in sorted(absent.items())]
        parts.append(f"### {title}\n\n" + table(("metric", "reason"), rows))
    return "\n".join(parts)


def missed() -> list[str]:
    """Return the places that register a family and were not executed."""
    _, places = recorded()
    return [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in modules()
        for call in registrations(tree)
        if not any((str(path), line) in places for line in range(call.lineno, (call.end_lineno or call.lineno) + 1))
    ]


@cache
def recorded() -> tuple[frozenset[Metric], frozenset[tuple[str, int]]]:
    """Return all metrics, and the places that registered them."""
    metrics: set[Metric] = set()
    places: set[tuple[str, int]] = set()
    for path, tree in modules():
        if next(registrations(tree), None) is None:
            continue
        module = import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
        recorder = Recorder(path.relative_to(SOURCE / "dynamo").parts[0])
        for function in functions(tree):
            execute(function, recorder, dict(vars(module)), str(path))
        metrics |= recorder.metrics
        places |= recorder.places
    return frozenset(metrics), frozenset(places)


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    """Return the modules of the source that may register families, without the registry's own."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(f".{kind}(" in text for kind in KINDS) and path != SOURCE / "dynamo" / "core" / "metrics.py":
            found.append((path, ast.parse(text)))
    return found


def registrations(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that register a family."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=kind, value=ast.Name(id=name) | ast.Attribute(attr=name))):
                if kind in KINDS and name in REGISTRIES:
                    yield node


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods that register families; not those inside of them."""
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if next(registrations(node), None) is not None:
                    yield node
            else:
                pending.append(node)


def execute(
    function: ast.FunctionDef | ast.AsyncFunctionDef, recorder: Recorder, names: dict[str, Any], path: str
) -> None:
    """Execute the statements that register families, and those that define what they use."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        names[argument.arg] = stub(argument.arg, recorder)
    helpers = {one.name for one in function.body if isinstance(one, ast.FunctionDef) and next(registrations(one), None)}
    for statement in branches_of(function.body):
        if defines_name(statement) or next(registrations(statement), None) is not None or calls(statement, helpers):
            body = ast.fix_missing_locations(ast.Module([WithoutReturn().visit(statement)], []))
            with contextlib.suppress(Exception):
                exec(compile(body, path, "exec"), names)


def branches_of(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and those of both branches in place of an `if`: one that fails does not prevent those after it."""
    for statement in statements:
        if isinstance(statement, ast.If):
            yield from branches_of([*statement.body, *statement.orelse])
        else:
            yield statement


def defines_name(statement: ast.stmt) -> bool:
    """Return whether a statement only defines a function or assigns to a local variable."""
    match statement:
        case ast.FunctionDef() | ast.AnnAssign(target=ast.Name()):
            return True
        case ast.Assign(targets=[ast.Name() | ast.Tuple()]):
            return True
    return False


def calls(statement: ast.stmt, helpers: set[str]) -> bool:
    """Return whether a statement calls one of the local functions."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers
        for node in ast.walk(statement)
    )


class WithoutReturn(ast.NodeTransformer):
    """Replaces `return x` by `x`, because statements are executed outside of their function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.copy_location(ast.Expr(node.value or ast.Constant(None)), node)


def stub(name: str, recorder: Recorder) -> Any:
    """Return an argument: the recorder for a registry, a prefix, or an object that has both."""
    if name in REGISTRIES:
        # `metrics` may be a registry, or an object with a registry.
        recording = Stub(prefix=PREFIX, registry=recorder)
        for kind in KINDS:
            setattr(recording, kind, getattr(recorder, kind))
        return recording
    if name == "prefix":
        return PREFIX
    options = Stub(metrics_prefix=PREFIX)
    return Stub(registry=recorder, _registry=recorder, metrics=recorder, metrics_prefix=PREFIX, _options=options)


if __name__ == "__main__":
    sys.exit(main())
