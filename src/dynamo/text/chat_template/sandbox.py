"""TemplateSandbox: Hugging Face's Jinja environment with bounds on steps, sizes and time. Pure.

A chat template is code that comes with a model. Each rendering has `Bounds`: the iterations of its loops, the size of
each value, the characters it produces in total, and a deadline. Operators, filters and calls check them before they
compute.

`QUICK` and `LONG` are for rendering in the serving process. They also restrict a template to the filters and methods
listed here, whose cost is known; anything else raises `OverBudget`, and the rendering is repeated in a child process
(`text.chat_template.child`), whose memory and time the operating system limits as well.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

POWER_MAX = 64  # Far beyond any template's arithmetic.
INT_BITS_MAX = 512  # Far beyond any count or hash; products of larger numbers are slow.
INT_MAX = 1 << INT_BITS_MAX
NODE_CHARS = 8  # Characters charged for an entry of a list or a dictionary, in addition to its text.
TIMED_CHARS = 4096  # An operation on at least this many characters checks the clock.
TIMED_TURNS = 16  # A loop checks the clock after this many iterations.
LOCAL_SOURCE_CHARS_MAX = 64 << 10  # The largest known template has about 30,000.
LOCAL_COMPARISONS_MAX = 500  # Comparisons are not counted while rendering, so their number in the source is bounded.
DATA_CHARS = 256  # Template text up to this length is not counted within a macro; the macro's calls are.
QUICK_INDENT_MAX = 8
QUICK_SEPARATOR_CHARS_MAX = 16
DATE_FORMAT_CHARS_MAX = 256

BOUNDS_KEY = "_dynamo_bounds"
"""Name under which a rendering's context carries its bounds."""

METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "get", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle", "isupper", "items", "join", "keys",
    "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "values",
})  # fmt: skip
"""Methods of built-in types whose cost is bounded by the sizes of their operands."""

PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
"""String methods whose result is as long as an argument requires."""
WIDE = re.compile(r"\d{7,}|%[-+ #0]*\*|\{[^{}]*\{")
"""Pattern of formats with a width of a million or more, or with a width taken from a value."""


class TemplateRefused(TemplateError):
    """A template called `raise_exception`, or exceeded a bound."""


class OverBudget(TemplateError):
    """A template needs more than its budget in this process; it must be rendered in a child process."""


class Unlisted(OverBudget):
    """A template uses an operation that is only allowed in a child process."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one rendering."""

    turns: int
    """Iterations of loops and calls of macros."""
    chars: int
    """Characters produced by all operations in total."""
    value_chars: int
    """Maximum characters of one value."""
    seconds: float
    is_local: bool = False
    """Whether the budget is for the serving process."""


QUICK = Budget(turns=20_000, chars=4 << 20, value_chars=64 << 10, seconds=0.02, is_local=True)
"""On the event loop: an ordinary conversation takes 0.1 ms."""
LONG = Budget(turns=1_000_000, chars=256 << 20, value_chars=16 << 20, seconds=1.0, is_local=True)
"""In a thread: a conversation of a million characters takes about 10 ms."""
FULL = Budget(turns=10_000_000, chars=1 << 30, value_chars=64 << 20, seconds=10.0)
"""In a child process: enough to compare each of 3,000 messages with each."""


class Bounds:
    """Remaining budget of one rendering."""

    __slots__ = ("_chars", "_deadline_s", "_is_wall", "_now", "_turns", "budget", "is_local", "value_chars")

    def __init__(self, budget: Budget = FULL, now: Callable[[], float] | None = None) -> None:
        """`now` is a clock; the default one measures processor time once `seconds` of wall time are over.

        Other threads and processes thus do not use up the budget, and a short rendering, which is over before, needs no
        system call. One that takes long may use up to twice the budget.
        """
        self.budget = budget
        self.is_local = budget.is_local
        self.value_chars = budget.value_chars
        self._turns = budget.turns
        self._chars = budget.chars
        self._is_wall = now is None
        self._now = time.perf_counter if now is None else now
        self._deadline_s = self._now() + budget.seconds

    def loop(self, values: Any) -> Any:
        """Return the values to iterate over. Raise `TemplateRefused` or `OverBudget`."""
        self._check_time()
        try:
            turns = len(values)
        except TypeError:
            return self._each(iter(values))
        if turns <= TIMED_TURNS:
            self.step(turns)
            return values
        return self._each(iter(values))

    def _each(self, values: Iterator[Any]) -> Iterator[Any]:
        count = 0
        for value in values:
            count += 1
            if count == TIMED_TURNS:
                self.step(count)
                self._check_time()
                count = 0
            yield value
        self.step(count)

    def call(self) -> None:
        """Count one call of a macro."""
        self.step(1)
        self._check_time()

    def step(self, turns: int) -> None:
        """Count iterations of a loop."""
        self._turns -= turns
        if self._turns < 0:
            self.fail(f"its loops and macros take more than {self.budget.turns} steps")

    def charge(self, chars: int) -> None:
        """Count characters that an operation produces or reads."""
        if chars > self.value_chars:
            self.too_large()
        self._chars -= chars
        if self._chars < 0:
            self.fail(f"it makes more than {self.budget.chars} characters in total")
        if chars > TIMED_CHARS:
            self._check_time()

    def check(self, value: Any) -> Any:
        """Count and return the result of an operation."""
        kind = value.__class__
        if kind is str:
            self.charge(len(value))
        elif kind is int:
            if not -INT_MAX < value < INT_MAX:
                self.fail(f"it computes a number of more than {INT_BITS_MAX} bits")
        elif kind in (list, tuple, dict):
            self.charge(self.weight(value))
        elif isinstance(value, str):
            self.charge(len(value))
        return value

    def weight(self, value: Any) -> int:
        """Return the approximate number of characters of a value when written. Raise if it is too large."""
        total = 0
        waiting = [value]
        while waiting:
            one = waiting.pop()
            total += NODE_CHARS
            kind = one.__class__
            if kind is str:
                total += len(one)
            elif kind is dict:
                waiting += one
                waiting += one.values()
            elif kind is list or kind is tuple:
                waiting += one
            elif isinstance(one, str):
                total += len(one)
            elif self.is_local and kind not in _SCALARS and not isinstance(one, Undefined):
                self.unlisted(f"a {kind.__name__} within a list")
            if total > self.value_chars:
                self.too_large()
        return total

    def unlisted(self, what: str) -> None:
        """Raise `Unlisted` if only listed operations are allowed."""
        if self.is_local:
            raise Unlisted(what)

    def too_large(self) -> NoReturn:
        self.fail(f"it makes a value of more than {self.value_chars} characters")

    def fail(self, reason: str) -> NoReturn:
        if self.is_local:
            raise OverBudget(reason)
        raise TemplateRefused(reason)

    def _check_time(self) -> None:
        if self._now() <= self._deadline_s:
            return
        if self._is_wall:
            self._is_wall, self._now = False, time.thread_time
            self._deadline_s = self._now() + self.budget.seconds
            return
        self.fail(f"it takes longer than {self.budget.seconds:g} s")


_SCALARS = frozenset({int, float, bool, type(None)})


def rendered(template: Template, values: dict[str, Any], bounds: Bounds) -> str:
    """Render a template within bounds, which are added to `values`, the globals included. Raise the errors of its code."""
    values[BOUNDS_KEY] = bounds
    context = template.new_context(values, shared=True)
    try:
        return joined(template.root_render_func(context), bounds)
    finally:
        # Macros refer to the context and to each other: without this, only the garbage collector frees them.
        for value in context.vars.values():
            if isinstance(value, Macro):
                vars(value).clear()
        context.vars.clear()


def joined(pieces: Iterable[str], bounds: Bounds) -> str:
    """Join the pieces of a prompt. Raise as soon as it is too long."""
    parts: list[str] = []
    left = bounds.value_chars
    for piece in pieces:
        parts.append(piece)
        left -= len(piece)
        if left < 0:
            bounds.too_large()
    return "".join(parts)


class Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's sandbox with bounds, and with faster access to the entries of a message."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `message.role`: a dictionary's own attributes win, as in Jinja; entries need no exception."""
        if obj.__class__ is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator that can produce large values from small ones."""
        bounds: Bounds = context.parent[BOUNDS_KEY]
        if operator == "+":
            if left.__class__ is str and right.__class__ is str:
                made = left + right
                bounds.charge(len(made))
                return made
            return bounds.check(left + right)
        if operator == "*":
            _check_product(left, right, bounds)
        elif operator == "**":
            if abs(right) > POWER_MAX or abs(left) > 1 << POWER_MAX:
                bounds.fail(f"it raises a number beyond the power of {POWER_MAX}")
        elif operator == "%" and isinstance(left, str):
            bounds.unlisted("% on text")
            _check_format(left, bounds)
        return bounds.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as Jinja's)
        """Call a function, a method or a macro."""
        bounds: Bounds = __context.parent[BOUNDS_KEY]
        kind = __obj.__class__
        if kind is BuiltinMethodType:
            if __obj.__name__ not in METHODS:
                bounds.unlisted(f"method {__obj.__name__}")
            _check_method(__obj, args, bounds)
        elif kind is Macro or kind is LoopContext:
            bounds.call()
        elif kind is MethodType:
            if __obj.__self__.__class__ not in (LoopContext, _Clock):
                bounds.unlisted(f"method {__obj.__name__}")
        elif __obj not in __self.listed_functions and not isinstance(__obj, Undefined):
            bounds.unlisted("a function")
        return bounds.check(super().call(__context, __obj, *args, **kwargs))

    listed_functions: tuple[Any, ...] = ()
    """Global functions whose cost is bounded."""

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `text.format` as the sandbox allows it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE.search(value.__self__):
            raise TemplateRefused("it formats text with a width that is not a small number")
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template


def may_be_local(source: str) -> bool:
    """Return whether a template is small enough to be compiled and rendered in the serving process."""
    return len(source) <= LOCAL_SOURCE_CHARS_MAX and len(_COMPARISONS.findall(source)) <= LOCAL_COMPARISONS_MAX


_COMPARISONS = re.compile(r"[=!<>]=|[<>]|\bin\b")
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP, _CHECK, _OUT, _CONCAT = "_dynamo_loop", "_dynamo_check", "_dynamo_out", "_dynamo_concat"


class _Counting(NodeTransformer):
    """Insert checks where Jinja has no hook: loops, literals, slices, `~`, and output collected into a value."""

    def __init__(self) -> None:
        self._collecting = 0
        """Number of enclosing macros and blocks whose output becomes a value."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (Jinja's interface)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:  # noqa: N802
        return self._collect(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self._collect(node)
        node.filter = nodes.Filter(node.filter, _CHECK, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if self._collecting:
            node.nodes = [self._counted(one) for one in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, *node.nodes[1:])

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if all(isinstance(one, nodes.Const) for one in node.items) else _filtered(node, _CHECK)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_plain = node.ctx != "load" or all(isinstance(one, nodes.Const) for one in node.items)
        return node if is_plain else _filtered(node, _CHECK)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_plain = all(isinstance(pair.value, nodes.Const) for pair in node.items)
        return node if is_plain else _filtered(node, _CHECK)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _OUT) if isinstance(node.arg, nodes.Slice) else node

    def _collect(self, node: nodes.Node) -> nodes.Node:
        self._collecting += 1
        self.generic_visit(node)
        self._collecting -= 1
        return node

    def _counted(self, node: nodes.Expr) -> nodes.Expr:
        if not isinstance(node, nodes.TemplateData):
            return _filtered(node, _OUT)
        if len(node.data) <= DATA_CHARS:
            return node
        return _filtered(nodes.Const(node.data, lineno=node.lineno), _OUT)


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, list(args), [], None, None, lineno=node.lineno)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text, for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


class BoundedNamespace(Namespace):
    """`namespace()`: values that a template keeps between iterations of a loop."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot store {name!r}")
        super().__setitem__(name, value)


def environment(now: Callable[[], datetime]) -> Environment:
    """Return the environment that Hugging Face gives templates, with bounds."""
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _Clock(now).strftime_now
    made.globals["namespace"] = BoundedNamespace
    made.listed_functions = (_raise_exception, BoundedNamespace, made.globals["range"])
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for name in list(made.filters):
        if name not in FREE_FILTERS:
            made.filters[name] = _bounded(plain, name)
    made.filters |= {_LOOP: _loop, _CHECK: _check, _OUT: _out, _CONCAT: _concat, "tojson": _tojson}
    return made


@dataclass(frozen=True, slots=True)
class _Clock:
    now: Callable[[], datetime]

    def strftime_now(self, format: str) -> str:
        if len(format) > DATE_FORMAT_CHARS_MAX:
            raise TemplateRefused(f"it formats a date with more than {DATE_FORMAT_CHARS_MAX} characters")
        return self.now().strftime(format)


# ---- filters ---------------------------------------------------------------------------------------------------------

FREE_FILTERS = frozenset({"abs", "count", "d", "default", "first", "float", "int", "items", "last", "length"})
"""Filters whose result is not larger than their input, in constant time."""

SIZED_FILTERS = frozenset({"capitalize", "lower", "reverse", "safe", "string", "title", "trim", "upper"})
"""Filters whose time is proportional to a text or a list."""

LAZY_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that iterate over a list; the operations they call are checked separately."""

LISTED_FILTERS = frozenset({*SIZED_FILTERS, *LAZY_FILTERS, "dictsort", "join", "list", "replace"})


def _bounded(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return one of Jinja's own filters with checks of its input and its result."""
    before = _BEFORE.get(name)
    is_listed, is_lazy = name in LISTED_FILTERS, name in LAZY_FILTERS

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        bounds: Bounds = context.parent[BOUNDS_KEY]
        if not is_listed:
            bounds.unlisted(f"filter {name}")
        if is_lazy:
            return plain_call(context, name, bounds.loop(value), args, kwargs)
        if before is not None:
            value = before(bounds, value, args, kwargs)
        return bounds.check(plain_call(context, name, value, args, kwargs))

    @pass_context
    def sized(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        made = direct(value, *args, **kwargs)
        context.parent[BOUNDS_KEY].check(made)
        return made

    def plain_call(context: Context, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plain.call_filter(name, value, args, kwargs, context)

    direct = plain.filters[name]
    return sized if name in SIZED_FILTERS else bounded


def _before_list(bounds: Bounds, value: Any, _: tuple[Any, ...], __: Mapping[str, Any]) -> Any:
    return bounds.loop(value)


def _before_join(bounds: Bounds, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Check the length of the text before it is joined."""
    parts = list(bounds.loop(value))
    separator = kwargs.get("d", args[0] if args else "")
    bounds.charge(bounds.weight(parts) + len(str(separator)) * len(parts))
    return parts


def _before_replace(bounds: Bounds, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    text = value if isinstance(value, str) else str(value)
    old, new = kwargs.get("old", args[0] if args else ""), kwargs.get("new", args[1] if len(args) > 1 else "")
    _check_replacement(text, (str(old), str(new)), bounds)
    return value


def _before_padding(bounds: Bounds, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    _check_numbers((*args, *kwargs.values()), bounds)
    return value


def _before_format(bounds: Bounds, value: Any, _: tuple[Any, ...], __: Mapping[str, Any]) -> Any:
    _check_format(str(value), bounds)
    return value


_BEFORE: Mapping[str, Callable[[Bounds, Any, tuple[Any, ...], Mapping[str, Any]], Any]] = {
    "list": _before_list,
    "join": _before_join,
    "replace": _before_replace,
    "center": _before_padding,
    "indent": _before_padding,
    "format": _before_format,
}
"""Check that runs before each filter."""


@pass_context
def _loop(context: Context, values: Any) -> Any:
    bounds: Bounds = context.parent[BOUNDS_KEY]
    return bounds.loop(values)


@pass_context
def _check(context: Context, value: Any) -> Any:
    bounds: Bounds = context.parent[BOUNDS_KEY]
    return bounds.check(value)


@pass_context
def _out(context: Context, value: Any) -> Any:
    """Count a value that is written or copied; lists belong to the request or were weighed when they were created."""
    if isinstance(value, (str, list, tuple, dict)):
        context.parent[BOUNDS_KEY].charge(len(value))
    return value


@pass_context
def _concat(context: Context, *values: Any) -> str:
    """Concatenate the texts of values (`~`)."""
    parts = [value if value.__class__ is str else str(value) for value in values]
    context.parent[BOUNDS_KEY].charge(sum(map(len, parts)))
    return "".join(parts)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON: Jinja's own filter escapes HTML, and a prompt is not HTML."""
    bounds: Bounds = context.parent[BOUNDS_KEY]
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > QUICK_INDENT_MAX:
        bounds.unlisted("a wide indent of tojson")
    pair = None if separators is None else tuple(map(str, separators))
    if pair is not None and sum(map(len, pair)) > QUICK_SEPARATOR_CHARS_MAX:
        bounds.unlisted("long separators of tojson")
    made = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)  # type: ignore[arg-type]
    bounds.charge(len(made))
    return made


# ---- checks before an operation --------------------------------------------------------------------------------------


def _check_product(left: Any, right: Any, bounds: Bounds) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > INT_BITS_MAX:
            bounds.fail(f"it computes a number of more than {INT_BITS_MAX} bits")
        return
    for one, times in ((left, right), (right, left)):
        if isinstance(one, (str, list, tuple)) and isinstance(times, int):
            if len(one) * times > bounds.value_chars:
                bounds.too_large()
        elif not isinstance(one, (int, float, str, list, tuple)):
            bounds.unlisted(f"* on a {type(one).__name__}")


def _check_method(method: Any, args: tuple[Any, ...], bounds: Bounds) -> None:
    owner, name = method.__self__, method.__name__
    if not isinstance(owner, str):
        return
    if name in PADDING:
        _check_numbers(args, bounds)
    elif name == "replace":
        _check_replacement(owner, args, bounds)
    elif name == "join" and args:
        values = args[0]
        if not isinstance(values, (list, tuple, dict, str)):
            bounds.unlisted(f"join of a {type(values).__name__}")
            return
        bounds.charge(sum(len(one) for one in values if isinstance(one, str)) + len(owner) * len(values))


def _check_numbers(values: Iterable[Any], bounds: Bounds) -> None:
    if any(isinstance(value, int) and value > bounds.value_chars for value in values):
        bounds.too_large()


def _check_format(text: str, bounds: Bounds) -> None:
    if WIDE.search(text):
        bounds.too_large()


def _check_replacement(text: str, args: tuple[Any, ...], bounds: Bounds) -> None:
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        most = len(text) + 1 if not args[0] else text.count(args[0])
        if len(text) + most * len(args[1]) > bounds.value_chars:
            bounds.too_large()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(message)
