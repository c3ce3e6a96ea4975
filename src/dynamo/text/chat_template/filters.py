"""Filters of chat templates: Jinja's own with checks of their input and result, and those that the sandbox inserts. Pure."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from dynamo.text.chat_template.bounds import BOUNDS_KEY, Bounds
from dynamo.text.chat_template.checks import check_format, check_numbers, check_replacement

QUICK_INDENT_MAX = 8
QUICK_SEPARATOR_CHARS_MAX = 16

LOOP, CHECK, OUT, CONCAT = "_dynamo_loop", "_dynamo_check", "_dynamo_out", "_dynamo_concat"
"""Names of the filters that `counting` inserts into a template."""

FREE_FILTERS = frozenset({"abs", "count", "d", "default", "first", "float", "int", "items", "last", "length"})
"""Filters whose result is not larger than their input, in constant time."""

SIZED_FILTERS = frozenset({"capitalize", "lower", "reverse", "safe", "string", "title", "trim", "upper"})
"""Filters whose time is proportional to a text or a list."""

LAZY_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that iterate over a list; the operations they call are checked separately."""

LISTED_FILTERS = frozenset({*SIZED_FILTERS, *LAZY_FILTERS, "dictsort", "join", "list", "replace"})


def bounded_filter(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """Return the filter `name` of Jinja's environment `plain` with checks of its input and its result."""
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
    check_replacement(text, (str(old), str(new)), bounds)
    return value


def _before_padding(bounds: Bounds, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    check_numbers((*args, *kwargs.values()), bounds)
    return value


def _before_format(bounds: Bounds, value: Any, _: tuple[Any, ...], __: Mapping[str, Any]) -> Any:
    check_format(str(value), bounds)
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


def set_filters(filters: dict[str, Any]) -> None:
    """Replace Jinja's filters by bounded ones, and add those that `counting` inserts."""
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for name in list(filters):
        if name not in FREE_FILTERS:
            filters[name] = bounded_filter(plain, name)
    filters.update({LOOP: _loop, CHECK: _check, OUT: _out, CONCAT: _concat, "tojson": _tojson})
