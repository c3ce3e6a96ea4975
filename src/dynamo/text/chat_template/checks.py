"""Checks of a template's operations before they are computed: operators and methods that make large values of small ones. Pure."""

import re
from collections.abc import Iterable
from typing import Any

from dynamo.text.chat_template.bounds import INT_BITS_MAX, Bounds

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


def check_product(left: Any, right: Any, bounds: Bounds) -> None:
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


def check_method(method: Any, args: tuple[Any, ...], bounds: Bounds) -> None:
    owner, name = method.__self__, method.__name__
    if not isinstance(owner, str):
        return
    if name in PADDING:
        check_numbers(args, bounds)
    elif name == "replace":
        check_replacement(owner, args, bounds)
    elif name == "join" and args:
        values = args[0]
        if not isinstance(values, (list, tuple, dict, str)):
            bounds.unlisted(f"join of a {type(values).__name__}")
            return
        bounds.charge(sum(len(one) for one in values if isinstance(one, str)) + len(owner) * len(values))


def check_numbers(values: Iterable[Any], bounds: Bounds) -> None:
    if any(isinstance(value, int) and value > bounds.value_chars for value in values):
        bounds.too_large()


def check_format(text: str, bounds: Bounds) -> None:
    if WIDE.search(text):
        bounds.too_large()


def check_replacement(text: str, args: tuple[Any, ...], bounds: Bounds) -> None:
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        most = len(text) + 1 if not args[0] else text.count(args[0])
        if len(text) + most * len(args[1]) > bounds.value_chars:
            bounds.too_large()
