"""TemplateSandbox: Hugging Face's Jinja environment with bounds on steps, sizes and time. Pure.

A chat template is code that comes with a model. Each rendering has `Bounds`: the iterations of its loops, the size of
each value, the characters it produces in total, and a deadline. Operators, filters and calls check them before they
compute.

`QUICK` and `LONG` are for rendering in the serving process. They also restrict a template to listed filters
(`filters`) and methods (`checks`), whose cost is known; anything else raises `OverBudget`, and the rendering is repeated in a child process
(`text.chat_template.child`), whose memory and time the operating system limits as well.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dynamo.text.chat_template.bounds import BOUNDS_KEY, Bounds, TemplateRefused
from dynamo.text.chat_template.checks import METHODS, WIDE, check_format, check_method, check_product
from dynamo.text.chat_template.counting import CountingTransformer
from dynamo.text.chat_template.filters import set_filters

POWER_MAX = 64  # Far beyond any template's arithmetic.
LOCAL_SOURCE_CHARS_MAX = 64 << 10  # The largest known template has about 30,000.
LOCAL_COMPARISONS_MAX = 500  # Comparisons are not counted while rendering, so their number in the source is bounded.
DATE_FORMAT_CHARS_MAX = 256
_COMPARISONS = re.compile(r"[=!<>]=|[<>]|\bin\b")
_DICT_ATTRIBUTES = frozenset(dir(dict))


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
            check_product(left, right, bounds)
        elif operator == "**":
            if abs(right) > POWER_MAX or abs(left) > 1 << POWER_MAX:
                bounds.fail(f"it raises a number beyond the power of {POWER_MAX}")
        elif operator == "%" and isinstance(left, str):
            bounds.unlisted("% on text")
            check_format(left, bounds)
        return bounds.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as Jinja's)
        """Call a function, a method or a macro."""
        bounds: Bounds = __context.parent[BOUNDS_KEY]
        kind = __obj.__class__
        if kind is BuiltinMethodType:
            if __obj.__name__ not in METHODS:
                bounds.unlisted(f"method {__obj.__name__}")
            check_method(__obj, args, bounds)
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
        template: nodes.Template = CountingTransformer().visit(super()._parse(source, name, filename))
        return template


def may_be_local(source: str) -> bool:
    """Return whether a template is small enough to be compiled and rendered in the serving process."""
    return len(source) <= LOCAL_SOURCE_CHARS_MAX and len(_COMPARISONS.findall(source)) <= LOCAL_COMPARISONS_MAX


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
    set_filters(made.filters)
    return made


@dataclass(frozen=True, slots=True)
class _Clock:
    now: Callable[[], datetime]

    def strftime_now(self, format: str) -> str:
        if len(format) > DATE_FORMAT_CHARS_MAX:
            raise TemplateRefused(f"it formats a date with more than {DATE_FORMAT_CHARS_MAX} characters")
        return self.now().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(message)
