"""Kimi K3: tags of three tokens, arguments with types."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather


def tag(inner: str) -> str:
    return f"<|open|>{inner}<|sep|>"


def end(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return tag(f'argument key="{key}" type="{kind}"') + value + end("argument")


def call(name: str, *inner: str) -> str:
    return tag(f'call tool="{name}" index="1"') + "".join(inner) + end("call")


def tools(*calls: str) -> str:
    return tag("tools") + "".join(calls) + end("tools")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            tools(call("now", argument("a", "string", " 2 &amp; <3> "), argument("b", "number", "2"))),
            ("", [("now", {"a": " 2 &amp; <3> ", "b": 2})]),
        ),
        (
            tools(
                call(
                    "now",
                    argument("a", "array", '["x"]'),
                    argument("b", "null", "null"),
                    argument("c", "number", "two"),
                )
            ),
            ("", [("now", {"a": ["x"], "b": None, "c": "two"})]),
        ),
        (tools(call("get_weather", tag('argument key="days"') + "2" + end("argument"))), ("", [weather(days=2)])),
        (tools(call("a&amp;b", argument("x&quot;", "boolean", "true"))), ("", [("a&b", {'x"': True})])),
        (tools(call("now"), call("now")), ("", [NOW, NOW])),
        (tools(call("now", tag('json type="object"') + '{"x": 1}' + end("json"))), ("", [("now", {"x": 1})])),
        (
            tag("response") + "Hi." + end("response") + tools(call("now")) + end("message") + "<|end_of_msg|>",
            ("Hi.", [NOW]),
        ),
        ("<|open|> tools <|sep|>" + call("now"), ("", [NOW])),
    ],
)
def test_kimi_k3_argument_types_are_applied(text: str, expected: Found) -> None:
    assert found("kimi_k3", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "A " + tools(call("now", argument("a", "string", "xy"))).partition("<|close|>")[0],
            ("A ", [("now", {"a": "xy"})]),
        ),
        ("A " + tag("tools") + tag("call index=1") + end("call") + end("tools") + " B", ("A  B", [])),
        ("A " + tag("tools") + "<|open|>call tool=", ("A ", [])),
        ("A <|sep|> B <|open|>C", ("A  B ", [])),
        ("A " + tag("foo") + "bar" + end("foo") + " B", ("A bar B", [])),
        ("A " + tag("x" * 600) + " B", ("A  B", [])),
        ("A " + tag("tools") + " dropped " + end("message") + " B", ("A  B", [])),
    ],
)
def test_kimi_k3_tags_are_never_content(text: str, expected: Found) -> None:
    assert found("kimi_k3", text) == expected
