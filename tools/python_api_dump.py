"""Write the public Python API of the installed `dynamo` as JSON: `python tools/python_api_dump.py OUT.json [EARLIER.json]`.

Runs with the interpreter of the released package and with ours, so it imports nothing of this repository. Without
`EARLIER.json` (an earlier output) it lists the modules below `ROOTS`; with it, the names of that file that exist. A
module that cannot be imported, because an optional library is missing, is read from its source.
"""

import ast
import builtins
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

ROOTS = (
    "dynamo._core",
    "dynamo._core.backend",
    "dynamo.common",
    "dynamo.health_check",
    "dynamo.llm",
    "dynamo.logits_processing",
    "dynamo.nixl_connect",
    "dynamo.prometheus_names",
    "dynamo.router.args",
    "dynamo.runtime",
)
OMITTED = {"tests", "logger", "log"}
ASSIGNED = re.compile(r"\bself\.([a-z]\w*)\s*(?::[^=\n]+)?=[^=]")
KINDS = ("", "", "*", "", "**")
"""The prefix of a parameter, by `inspect.Parameter.kind`."""


def main(out: str, earlier: str | None = None) -> int:
    """Write the API of the modules below `ROOTS`, or of the names that an earlier output lists."""
    listed: dict[str, Any] = json.loads(Path(earlier).read_text(encoding="utf-8")) if earlier else {}
    names = listed or dict.fromkeys(modules())
    api = {name: module_api(name, listed.get(name)) for name in names}
    Path(out).write_text(json.dumps(api, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def modules() -> Iterator[str]:
    """Yield the roots and the public modules below them."""
    for root in ROOTS:
        yield root
        file = located(root)
        for one in sorted(file.parent.rglob("*.py")) if file and file.name == "__init__.py" else ():
            parts = one.relative_to(file.parent).with_suffix("").parts if file else ()
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if parts and not any(part.startswith("_") or part in OMITTED for part in parts):
                yield ".".join((root, *parts))


def located(name: str) -> Path | None:
    """Return the source file of a module, found without importing it; None for an extension or a missing module."""
    _, *parts = name.split(".")
    for place in importlib.import_module("dynamo").__path__:
        for file in (Path(place, *parts, "__init__.py"), Path(place, *parts).with_suffix(".py")):
            if file.exists():
                return file
    return None


def module_api(name: str, names: Iterable[str] | None = None) -> dict[str, Any] | None:
    """Return each public name of a module, or each of `names`, with its description; None if there is no such module."""
    file = located(name)
    try:
        module = loaded(name)
    except ImportError:
        found = dict(parsed(file, name)) if file else None
        return found if not names or found is None else {one: found[one] for one in names if one in found}
    public = names or filter(is_public, getattr(module, "__all__", None) or own_names(module, file))
    return {one: described(getattr(module, one)) for one in sorted(set(public)) if hasattr(module, one)}


def loaded(name: str) -> ModuleType:
    """Import a module; one inside an extension module is an attribute of it. Raises what the import raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, leaf = name.rpartition(".")
        inner = getattr(importlib.import_module(parent), leaf, None)
        if inspect.ismodule(inner):
            return inner
        raise


def own_names(module: ModuleType, file: Path | None) -> set[str]:
    """Return the names that a module without `__all__` defines; a package also exports what it imports from `dynamo`."""
    names = set(vars(module))
    if file:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {name for node in statements(tree) for name in bound(node)}
        names |= {name for name, _ in imported(tree, module.__name__)} if file.name == "__init__.py" else set()
    return {name for name in names if is_public(name) and not inspect.ismodule(getattr(module, name, None))}


def is_public(name: str) -> bool:
    return not name.startswith("_") and name not in OMITTED


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those in `if` and `try` included."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            pending += node.body + node.orelse + [one for h in getattr(node, "handlers", ()) for one in h.body]


def bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def imported(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a package imports from Dynamo, and the module that it comes from."""
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("dynamo.")):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((alias.asname or alias.name, source) for alias in node.names)


# Imported objects


def described(value: Any) -> dict[str, Any]:
    """Return kind, parameters and, of a class, bases and members."""
    if inspect.isclass(value):
        return class_api(value)
    if inspect.isroutine(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": "module" if inspect.ismodule(value) else "value"}


def class_api(cls: type[Any]) -> dict[str, Any]:
    """Return constructor, bases (of exceptions, which `except` uses) and members of a class."""
    own = [base for base in cls.__mro__ if base is cls or is_of_dynamo(base)]
    names = {name for base in own for name in (*vars(base), *inspect.get_annotations(base)) if is_public(name)}
    members = {name: member(cls, name) for name in sorted(names)}
    api: dict[str, Any] = {"kind": "class", "parameters": parameters(cls), "members": members}
    if issubclass(cls, BaseException):
        api["bases"] = [base.__name__ for base in cls.__mro__[1:-2]]
    if issubclass(cls, Enum):
        api["parameters"] = None
    api["assigned"] = sorted(set(assigned(own)) - set(members))
    return api


def is_of_dynamo(cls: type[Any]) -> bool:
    """Return whether a class is Dynamo's; classes of extension modules name `builtins` as their module."""
    module = cls.__module__
    return module.startswith("dynamo.") or (module == "builtins" and cls not in vars(builtins).values())


def member(cls: type[Any], name: str) -> list[str] | None:
    """Return the parameters of a method; None for an attribute."""
    value = inspect.getattr_static(cls, name, None)
    if isinstance(value, staticmethod | classmethod) or inspect.isroutine(value):
        return parameters(getattr(cls, name))
    return None


def assigned(classes: list[type[Any]]) -> Iterator[str]:
    """Yield the attributes that methods of Python classes assign."""
    for cls in classes:
        try:
            yield from ASSIGNED.findall(inspect.getsource(cls))
        except (OSError, TypeError):
            continue


def parameters(value: Any) -> list[str]:
    """Return `name`, `name=default`, `*name` for each parameter; `["..."]` if the object does not state them."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return ["..."]
    lines = []
    star = False
    for one in signature.parameters.values():
        if one.name in {"self", "cls"}:
            continue
        star |= one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not star:
            lines.append("*")
            star = True
        default = "" if one.default is one.empty else f"={stated(one.default)}"
        lines.append(f"{KINDS[one.kind]}{one.name}{default}")
    return lines


def stated(default: Any) -> str:
    """Return a default as text; `...` for one whose text differs between runs or is not stated."""
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    return repr(default) if isinstance(default, bool | int | float | str | bytes | tuple | None) else "..."


# Modules read from their source


def parsed(file: Path, module: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the public names of a module's source with their descriptions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file.name == "__init__.py":
        for name, source in imported(tree, module):
            found = module_api(source, [name]) or {}
            yield from found.items()
    for node in statements(tree):
        for name in filter(is_public, bound(node)):
            if isinstance(node, ast.ClassDef):
                yield name, parsed_class(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, {"kind": "function", "parameters": parsed_parameters(node.args)}
            else:
                yield name, {"kind": "value"}


def parsed_class(cls: ast.ClassDef) -> dict[str, Any]:
    """Return the description of a class from its source, without inherited members."""
    members: dict[str, list[str] | None] = {}
    constructor = ["..."]
    for node in cls.body:
        for name in bound(node):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            decorators = {ast.unparse(one) for one in getattr(node, "decorator_list", ())}
            is_method = function and not any("property" in one or one.endswith(".setter") for one in decorators)
            found = parsed_parameters(node.args) if is_method else None  # type: ignore[attr-defined]
            if name == "__init__" and found is not None:
                constructor = found
            elif is_public(name):
                members[name] = found
    text = ast.unparse(cls)
    names = sorted(set(ASSIGNED.findall(text)) - set(members))
    return {"kind": "class", "parameters": constructor, "members": members, "assigned": names}


def parsed_parameters(arguments: ast.arguments) -> list[str]:
    """Return the parameters of a function from its source, as `parameters` does."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    lines = [f"{one.arg}{given(default)}" for one, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        lines.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        lines.append("*")
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    lines += [f"{one.arg}{given(default)}" for one, default in keyword]
    lines += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [line for line in lines if line not in {"self", "cls"}]


def given(default: ast.expr | None) -> str:
    if default is None:
        return ""
    return f"={ast.unparse(default)}" if isinstance(default, ast.Constant) else "=..."


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
