"""Copies in Python: `copy.deepcopy`, `copy.copy`, `.copy()`, `dict(x)`, `list(x)`, `set(x)` and `dataclasses.replace`, from the syntax tree."""

import ast
import re
from collections.abc import Sequence

from dynamo.ops.clones.sites import Bucket, CloneSite, shortened

CONSTRUCTORS = frozenset({"dict", "list", "set", "tuple", "bytes"})
COPIES = frozenset({"deepcopy", "copy", "replace"})
MODULES = frozenset({"copy", "dataclasses", "msgspec", "structs"})
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LIVE = re.compile(r"\.(?:values|items|keys)\(\)$|^self\.")
"""Sources that may change while they are iterated."""


def python_sites(path: str, source: bytes) -> list[CloneSite]:
    """Return the copies in a file; none in one that is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.decode(errors="replace").splitlines()
    found: list[CloneSite] = []
    _visit(tree, [], path, lines, found)
    return found


def _visit(node: ast.AST, parents: list[ast.AST], path: str, lines: Sequence[str], found: list[CloneSite]) -> None:
    if isinstance(node, ast.Call) and (kind := _copied(node)):
        found.append(_site(node, kind, parents, path, lines))
    for child in ast.iter_child_nodes(node):
        _visit(child, [*parents, node], path, lines, found)


def _copied(call: ast.Call) -> str:
    """Return the name of a copying call; empty for another one."""
    function = call.func
    if isinstance(function, ast.Name):
        is_constructor = function.id in CONSTRUCTORS and len(call.args) == 1 and not call.keywords
        return function.id if is_constructor or function.id in {"deepcopy"} else ""
    if not isinstance(function, ast.Attribute):
        return ""
    module = function.value.id if isinstance(function.value, ast.Name) else getattr(function.value, "attr", "")
    if function.attr in COPIES and module in MODULES:
        return f"{module}.{function.attr}"
    return ".copy" if function.attr == "copy" and not call.args else ""


def _site(call: ast.Call, kind: str, parents: list[ast.AST], path: str, lines: Sequence[str]) -> CloneSite:
    function = next((one for one in reversed(parents) if isinstance(one, FUNCTIONS)), None)
    inside = parents[parents.index(function) + 1 :] if function is not None else parents
    is_test = bool(re.search(r"(?:^|/)(?:tests?)/|(?:^|/)test_[^/]*$", path))
    name = "" if function is None else function.name
    is_in_loop = any(isinstance(one, LOOPS) for one in inside) and not _is_iterated_once(call, inside)
    return CloneSite(
        path=path,
        line=call.lineno,
        snippet=shortened(lines[call.lineno - 1]),
        kind=kind,
        bucket=_bucket(call, kind, inside, function, is_test=is_test),
        function=name,
        is_in_loop=is_in_loop,
        is_async=isinstance(function, ast.AsyncFunctionDef),
        is_test=is_test,
    )


def _is_iterated_once(call: ast.Call, inside: list[ast.AST]) -> bool:
    """Return whether the copy is what the innermost loop goes through, so that it is made once."""
    loop = next((one for one in reversed(inside) if isinstance(one, LOOPS)), None)
    sources = (
        [loop.iter]
        if isinstance(loop, ast.For | ast.AsyncFor)
        else [one.iter for one in getattr(loop, "generators", ())][:1]
    )
    return any(call in ast.walk(one) for one in sources)


def _bucket(call: ast.Call, kind: str, inside: list[ast.AST], function: ast.AST | None, *, is_test: bool) -> Bucket:
    if is_test or function is None or any(isinstance(one, ast.Raise | ast.ExceptHandler) for one in inside):
        return Bucket.COLD
    if any(isinstance(one, ast.Assert) for one in inside):
        return Bucket.COLD
    argument = call.args[0] if call.args else None
    text = "" if argument is None else ast.unparse(argument)
    if _is_iterated_once(call, inside) and LIVE.search(text):
        return Bucket.ASYNC  # A snapshot of what may change meanwhile.
    if isinstance(argument, ast.Await):
        return Bucket.COLD
    if isinstance(argument, ast.Call | ast.GeneratorExp | ast.ListComp | ast.Constant) and kind in CONSTRUCTORS:
        return (
            Bucket.MOVE if isinstance(argument, ast.ListComp) else Bucket.COLD
        )  # It builds a value that exists nowhere else.
    if "deepcopy" in kind or kind.endswith("replace"):
        return Bucket.API
    return Bucket.BORROW
