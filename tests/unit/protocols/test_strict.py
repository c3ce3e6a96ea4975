"""Strict decoding: the error of a body contains its place."""

import contextlib
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.strict import StrictDecoder, joined, refuse


class Leaf(msgspec.Struct, tag_field="type", tag="leaf", forbid_unknown_fields=True):
    text: str


class Twig(msgspec.Struct, tag_field="type", tag="twig", forbid_unknown_fields=True):
    size: int


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parts: list[Leaf | Twig] = []
    kind: Literal["oak", "elm"] | None = None
    any: Any = None


trees = StrictDecoder(Tree)


def decode_error(body: bytes, where: str = "") -> tuple[str, str | None]:
    with pytest.raises(InvalidArgument) as caught:
        trees.decode(body, where)
    return str(caught.value), caught.value.param


def test_valid_body_is_decoded_to_a_struct() -> None:
    tree = trees.decode(b'{"name": "x", "parts": [{"type": "leaf", "text": "a"}]}')
    assert tree == Tree("x", [Leaf("a")])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"nam": "x", "b": 1}', "nam", "Unsupported parameter(s): `nam`, `b`"),
        (b'{"name": "x", "parts": [{"type": "leaf", "text": "a", "b": 1}]}', "parts[...].b", "`parts[...].b`"),
        (b'{"parts": []}', "name", "missing field `name`"),
        (b'{"name": "x", "parts": [{"type": "leaf"}]}', "parts[...].text", "missing field `parts[...].text`"),
        (b'{"name": "x", "parts": [{"type": "root"}]}', "parts[...].type", "`root` is not supported"),
        (b'{"name": 1}', "name", "Expected `str`, got `int`"),
        (b'{"name": "x", "kind": "ash"}', "kind", "Invalid enum value 'ash'"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"{", None, "truncated"),
        (b'{"b": ', None, "truncated"),
        (b'"\xff"', None, "Failed to deserialize"),
    ],
)
def test_decoding_error_names_the_path(body: bytes, param: str | None, words: str) -> None:
    message, named = decode_error(body)
    assert named is None if param is None else (named or "").replace("[0]", "[...]") == param
    assert words in message.replace("[0]", "[...]")


def test_decoding_error_path_has_the_given_prefix() -> None:
    assert decode_error(b'{"name": "x", "b": 1}', "input[3]")[1] == "input[3].b"
    assert decode_error(b'{"name": "x", "parts": [1]}', "input[3]")[1] == "input[3].parts[0]"


def test_unknown_fields_are_ignored_only_at_the_top_level() -> None:
    assert trees.decode(b'{"name": "x", "b": 1}', ignore_unknown=True) == Tree("x")
    with pytest.raises(InvalidArgument, match=r"parts\[0\]\.b"):
        trees.decode(b'{"name": "x", "c": 1, "parts": [{"type": "leaf", "text": "a", "b": 1}]}', ignore_unknown=True)


def test_deeply_nested_body_is_refused() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "nested too deeply" in decode_error(b'{"name": "x", "any": ' + deep + b"}")[0]
    assert decode_error(b'{"name": "x", "b": ' + deep + b"}")[0]


@given(st.binary(max_size=60))
def test_any_body_is_decoded_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        trees.decode(body)


def test_refusal_names_its_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        refuse("background")
    assert caught.value.param == "background"
    assert "`background`" in str(caught.value)


def test_paths_are_joined() -> None:
    assert joined("", ".a.b") == "a.b"
    assert joined("x", ".a") == "x.a"
    assert joined("x", "[1]") == "x[1]"
    assert joined("x", "") == "x"
