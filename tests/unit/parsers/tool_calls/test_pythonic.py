"""Pythonic: calls as Python writes them."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A [get_weather(city="Oslo", days=2), now()] B', ("A  B", [weather(city="Oslo", days=2), NOW])),
        ("[ now ( ) ]", ("[ now ( ) ]", [])),
        ("[ now( ) ]", ("", [NOW])),
        ("[get_weather( city = 'O\"s' , tags=['a', 1.5, None, True], days=-3, )]",
         ("", [weather(city='O"s', tags=["a", 1.5, None, True], days=-3)])),
        ("[now(), other(x={'a': 1})]", ("", [NOW, ("other", {"x": {"a": 1}})])),
        ("<|python_start|>[now()]<|python_end|>", ("", [NOW])),
        ("[link](http://x) [now()]", ("[link](http://x) ", [NOW])),
        ("[now()]\n[now()]\n", ("\n", [NOW, NOW])),
    ],
)  # fmt: skip
def test_pythonic_call_list_is_parsed_anywhere_in_the_text(text: str, expected: Found) -> None:
    assert found("pythonic", text) == expected


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[main()](x)", "[now(1)]", "[now]", "[now(", "[now(x", "now()", "[[x]]", "["]
)
def test_pythonic_list_without_known_tools_or_keywords_is_content(text: str) -> None:
    assert found("pythonic", text) == (text, [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A [get_weather(city="Os', ("A ", [weather(city="Os")])),
        ("A [get_weather(days=1", ("A ", [weather()])),
        ("A [now(", ("A [now(", [])),
        ("A [now()", ("A ", [NOW])),
        ("A [now(x=1+2), now()] B", ("A  B", [NOW])),
        ("A [now(x=f(1))] B", ("A  B", [NOW])),
        ("A [now(x=1, 2)] B", ("A  B", [("now", {"x": 1})])),
        ("A [now(), 1] B", ("A  B", [NOW])),
        ("A [now(x=1 <|python_end|> B", ("A  B", [("now", {"x": 1})])),
    ],
)
def test_truncated_pythonic_call_is_closed(text: str, expected: Found) -> None:
    assert found("pythonic", text) == expected
