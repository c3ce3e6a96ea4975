"""Gemma 4 format of tool calls."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather

Q = '<|"|>'


def gemma(name: str, inner: str) -> str:
    return f"<|tool_call>call:{name}{{{inner}}}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (gemma("get_weather", f'city:{Q}a "q" \\n }}<x>\n{Q} , days : 2'), [weather(city='a "q" \\n }<x>\n', days=2)]),
        (
            gemma("now", f"a:[{Q}x{Q},{{b:null}}],c:-1.5e3,d:true"),
            [("now", {"a": ["x", {"b": None}], "c": -1500.0, "d": True})],
        ),
        (gemma("now", f"a:Oslo,b:,c:{Q}{Q},d:[]"), [("now", {"a": "Oslo", "b": "", "c": "", "d": []})]),
        (gemma("now", f'"a":1,{Q}b{Q}:2'), [("now", {})]),
        (gemma("now", f"{Q}b{Q}:2"), [("now", {"b": 2})]),
        (gemma("now", "") + "\n" + gemma("now", ""), [NOW, NOW]),
        (
            gemma("now", "a:nil,b:none,c:NULL,d:[None,Null,{e:NIL}],f:nils"),
            [("now", {"a": None, "b": None, "c": None, "d": [None, None, {"e": None}], "f": "nils"})],
        ),
        (gemma("now", f"a:TRUE,b:FALSE,c:{Q}nil{Q}"), [("now", {"a": True, "b": False, "c": "nil"})]),
    ],
)
def test_gemma4_bare_keys_and_marked_strings_are_parsed(text: str, expected: list[tuple[str, object]]) -> None:
    assert found("gemma4", text) == ("", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A <|tool_call>call:now{{x:{Q}ab", ("A ", [("now", {"x": "ab"})])),
        ("A <|tool_call>call:now{x:12", ("A ", [NOW])),
        ("A <|tool_call>call:now{x", ("A ", [NOW])),
        ("A <|tool_call>call:no", ("A ", [])),
        ("A <|tool_call>now{x:1}<tool_call|> B", ("A  B", [])),
        ("A <|tool_call>call:now{x:1,,}<tool_call|> B", ("A  B", [("now", {"x": 1})])),
        (f"A <|tool_call>call:now{{x:<{Q}<tool_call|> B", ("A  B", [NOW])),
        ("A <|tool_call>call:now <|tool_call>call:now{}<tool_call|> B", ("A  B", [NOW])),
        (f"A <tool_call|> {Q} B", ("A   B", [])),
    ],
)
def test_gemma4_malformed_call_is_dropped(text: str, expected: Found) -> None:
    assert found("gemma4", text) == expected
