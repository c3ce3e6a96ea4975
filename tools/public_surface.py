"""Write the public surface into tests/house/public_surface.json: import paths, commands with flags, variables and metrics.

`--print` writes it to standard output instead; `--source DIR` reads another checkout's `src`.
"""

import ast
import gc
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "house" / "public_surface.json"
MODULES = (
    "dynamo",
    "dynamo._core",
    "dynamo._core.backend",
    "dynamo.backend",
    "dynamo.common.backend",
    "dynamo.common.backend.metrics",
    "dynamo.common.backend.publisher",
    "dynamo.common.backend.worker",
    "dynamo.health_check",
    "dynamo.llm",
    "dynamo.llm.exceptions",
    "dynamo.prometheus_names",
    "dynamo.runtime",
    "dynamo.runtime.logging",
)
"""Modules that programs for upstream import, and those that docs/ names for authors of engines."""
COMMANDS = (
    "dynamo.cli serve",
    "dynamo.cli chat",
    "dynamo.cli route explain",
    "dynamo.cli route state",
    "dynamo.cli top",
    "dynamo.cli plan explain",
    "dynamo.cli plan replay",
    "dynamo.cli replay TRACE",
    "dynamo.cli replay convert",
    "dynamo.cli replay datagen analyze",
    "dynamo.cli replay datagen synthesize",
    "dynamo.cli replay fit",
    "dynamo.cli replay sin-synth",
    "dynamo.cli replay sweep",
    "dynamo.cpu",
    "dynamo.frontend",
    "dynamo.global_planner",
    "dynamo.global_router",
    "dynamo.indexer",
    "dynamo.mocker",
    "dynamo.openai_proxy",
    "dynamo.replay TRACE",
    "dynamo.router",
    "dynamo.select_service",
    "dynamo.sglang",
    "dynamo.slot_tracker",
    "dynamo.trtllm",
    "dynamo.vllm",
)
ENGINES = ("sglang", "tensorrt_llm", "vllm")
UNSUPPORTED_FLAG = {"flag", "variable", "default", "aliases", "hint"}
"""Fields of the dataclass that describes a flag of upstream that is only accepted with its default."""
VARIABLE = re.compile(
    r"(AWS|DYN|ETCD|HF|KVBM|KV_EVENTS|METRICS|MODEL_EXPRESS|NATS|OTEL|SGLANG|SSL|TIKTOKEN|VLLM|XDG)_[A-Z0-9_]*[A-Z0-9]|LOG_LEVEL"
)
ENV_IN_HELP = re.compile(r" \[([A-Z0-9_]+)\]$")
DECLARATIONS = {"counter", "gauge", "histogram"}
UNKNOWN = "*"
"""The part of a metric's name or label that is only known at run time."""


def main() -> int:
    """Write the snapshot, or print it."""
    arguments = sys.argv[1:]
    source = Path(arguments[arguments.index("--source") + 1]) if "--source" in arguments else ROOT / "src"
    sys.path.insert(0, str(source))
    if "--command" in arguments:
        print(json.dumps(flags_of(arguments[-1])))
        return 0
    text = json.dumps(surface(source), indent=1, sort_keys=True) + "\n"
    if "--print" in arguments:
        sys.stdout.write(text)
    else:
        SNAPSHOT.write_text(text, encoding="utf-8")
    return 0


def surface(source: Path) -> dict[str, Any]:
    """Return the surface of the package in `source`."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((source / "dynamo").rglob("*.py"))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        flags = list(threads.map(partial(in_child, source), COMMANDS))
    return {
        "modules": {name: names_of(name) for name in MODULES},
        "commands": dict(zip(COMMANDS, flags, strict=True)),
        "variables": sorted({name for tree in trees for name in variables_in(tree)}),
        "metrics": sorted({metric for tree in trees for metric in Metrics(tree).found()}),
    }


# Python names


def names_of(address: str) -> dict[str, list[str]]:
    """Return a module's public names, each with the parameters of its call or, of a class, its members too."""
    module = importlib.import_module(address)
    public = getattr(module, "__all__", None) or [name for name in dir(module) if is_own(module, name)]
    return {name: described(getattr(module, name)) for name in sorted(public)}


def is_own(module: ModuleType, name: str) -> bool:
    """Return whether a name of a module without `__all__` is public: neither private nor imported for use."""
    value = getattr(module, name)
    if name.startswith("_") or inspect.ismodule(value):
        return False
    return name not in vars(module) or getattr(value, "__module__", module.__name__) == module.__name__


def described(value: Any) -> list[str]:
    """Return the parameters of a function, or the members of a class; empty for other objects."""
    if inspect.isclass(value):
        return sorted(name for name in dir(value) if not name.startswith("_"))
    if callable(value) and not isinstance(value, GenericAlias):
        return [name for name in inspect.signature(value).parameters if not name.startswith("_")]
    return []


# Commands


class Captured(BaseException):
    """Ends a command as soon as its parser is complete."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser = parser


def in_child(source: Path, command: str) -> list[str]:
    """Return the flags of one command, found by a process of its own: commands prepare their process."""
    environment = {name: value for name, value in os.environ.items() if not VARIABLE.fullmatch(name)}
    child = [sys.executable, __file__, "--source", str(source), "--command", command]
    output = subprocess.run(child, env=environment, check=True, stdout=subprocess.PIPE).stdout
    flags: list[str] = json.loads(output)
    return flags


def flags_of(command: str) -> list[str]:
    """Return each flag with its variable, values and default, as one line of text."""
    for name in ENGINES:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    parser = parser_of(command)
    declared = {name for action in parser._actions for name in action.option_strings}
    return sorted(map(line_of, parser._actions)) + sorted(unsupported_flags(declared))


def parser_of(command: str) -> ArgumentParser:
    """Return the parser of a command. Raises `LookupError` if it reads no arguments."""

    def capture(parser: ArgumentParser, *_: Any) -> None:
        raise Captured(parser)

    ArgumentParser.parse_known_args = capture  # type: ignore[assignment, method-assign]
    module, *words = command.split()
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except Captured as captured:
        return captured.parser
    raise LookupError(f"{command} does not read its arguments")


def line_of(action: Action) -> str:
    """Return `--flag, --alias [VARIABLE] {values} = default`."""
    names = ", ".join(action.option_strings) or f"<{action.metavar or action.dest}>"
    variable = ENV_IN_HELP.search(action.help or "")
    values = "{" + ", ".join(map(str, action.choices)) + "}" if action.choices else ""
    default = "" if action.default in (None, SUPPRESS) else f"= {portable(action.default)}"
    return " ".join(filter(None, [names, variable[0].strip() if variable else "", values, default]))


def portable(value: Any) -> str:
    """Return a default as text that is the same on every machine."""
    return str(value).replace(os.path.expanduser("~"), "~")


def unsupported_flags(declared: set[str]) -> Iterator[str]:
    """Yield the flags of upstream that the command's tables list and its configuration does not declare."""
    gc.unfreeze()  # Commands exempt the objects of their modules from collection, and from this list.
    for one in gc.get_objects():
        if (
            is_dataclass(one)
            and not isinstance(one, type)
            and {field.name for field in fields(one)} == UNSUPPORTED_FLAG
        ):
            names = ", ".join((one.flag, *one.aliases))
            if one.flag not in declared:
                yield f"{names}{f' [{one.variable}]' if one.variable else ''} only {one.default}"


# Variables


def variables_in(tree: ast.Module) -> Iterator[str]:
    """Yield the variables whose whole names are literals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
            yield node.value


# Metrics


class Metrics:
    """The metrics that one module declares, each as `kind name labels`.

    Names are evaluated as far as literals reach: constants, variables, loops over literals, and parameters of functions
    that the module itself calls. The rest is `*`.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents: dict[ast.AST, ast.AST] = {}

    def found(self) -> Iterator[str]:
        """Yield each declared metric."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        if not any(map(declares_metric, calls)):
            return
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        for call in filter(declares_metric, calls):
            labels = self._labels(call)
            for name in self._values(call.args[0], call, ()) - {UNKNOWN}:
                yield f"{ast.unparse(call.func).rpartition('.')[2]} {name} {labels}".rstrip()

    def _labels(self, call: ast.Call) -> str:
        given = [word.value for word in call.keywords if word.arg == "labels"] + call.args[2:3]
        return ",".join(self._items(given[0], call)) if given else ""

    def _items(self, node: ast.expr, scope: ast.AST) -> list[str]:
        """Return the elements of a tuple or list."""
        if isinstance(node, ast.Tuple | ast.List):
            return [text for element in node.elts for text in self._element(element, scope)]
        if isinstance(node, ast.Name):
            values = list(itertools.islice(self._bound(node.id, scope), 1))
            return self._items(values[0], scope) if values else [UNKNOWN]
        return [UNKNOWN]

    def _element(self, node: ast.expr, scope: ast.AST) -> list[str]:
        if isinstance(node, ast.Starred):
            return self._items(node.value, scope)
        return sorted(self._values(node, scope, ()))

    def _values(self, node: ast.expr, scope: ast.AST, seen: tuple[str, ...]) -> set[str]:
        """Return the texts that an expression may have."""
        match node:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], scope, seen)
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope, seen)
            case ast.FormattedValue(value=value):
                return self._values(value, scope, seen)
            case ast.Call(args=[argument]):
                return {
                    f"{UNKNOWN}{text}" if text != UNKNOWN else UNKNOWN for text in self._values(argument, scope, seen)
                }
            case ast.Name(id=name) if name not in seen:
                values = [self._values(value, scope, (*seen, name)) for value in self._bound(name, scope)]
                return set().union(*values) or {UNKNOWN}
        return {UNKNOWN}

    def _joined(self, parts: list[Any], scope: ast.AST, seen: tuple[str, ...]) -> set[str]:
        choices = [sorted(self._values(part, scope, seen)) for part in parts]
        return {re.sub(r"\*+", UNKNOWN, "".join(chosen)) for chosen in itertools.product(*choices)}

    def _bound(self, name: str, scope: ast.AST) -> Iterator[ast.expr]:
        """Yield the expressions that a name is bound to, in the functions around `scope` or else in the module."""
        node = scope
        while node is not self._tree:
            node = self._parents[node]
            if found := list(self._bound_in(node, name)):
                yield from found
                return

    def _bound_in(self, node: ast.AST, name: str) -> Iterator[ast.expr]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._arguments(node, name)
        inner = (
            ast.walk(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ast.iter_child_nodes(node)
        )
        for one in inner:
            match one:
                case ast.Assign(targets=[target], value=value):
                    yield from picked(target, value, name)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    yield from picked(target, value, name)
                case ast.For(target=target, iter=items) | ast.comprehension(target=target, iter=items):
                    for item in self._iterated(items):
                        yield from picked(target, item, name)

    def _iterated(self, items: ast.expr) -> Iterator[ast.expr]:
        """Yield what a loop goes through: the elements of a literal, or the pairs of a literal dictionary."""
        match items:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                yield from elements
            case ast.Dict(keys=keys):
                yield from (key for key in keys if key is not None)
            case ast.Call(func=ast.Attribute(value=owner, attr="items")):
                for one in self._resolved(owner):
                    if isinstance(one, ast.Dict):
                        pairs = zip(one.keys, one.values, strict=True)
                        yield from (ast.Tuple(elts=[key, value]) for key, value in pairs if key is not None)
            case ast.Name():
                for one in self._resolved(items):
                    yield from self._iterated(one)

    def _resolved(self, node: ast.expr) -> Iterator[ast.expr]:
        """Yield the values of a name of the module that are not names themselves; another expression as it is."""
        values = self._bound_in(self._tree, node.id) if isinstance(node, ast.Name) else [node]
        yield from (value for value in values if not isinstance(value, ast.Name))

    def _arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[ast.expr]:
        """Yield what the module's own calls pass for a parameter."""
        parameters = [one.arg for one in function.args.args if one.arg != "self"]
        if name in parameters:
            position = parameters.index(name)
            for node in ast.walk(self._tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("self.") == function.name:
                    yield from node.args[position : position + 1]


def declares_metric(call: ast.Call) -> bool:
    """Return whether a call declares a metric: `registry.counter(name, …)`."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in DECLARATIONS and bool(call.args)


def picked(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    """Yield the part of a value that an assignment binds to a name."""
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from picked(one, part, name)


if __name__ == "__main__":
    sys.exit(main())
