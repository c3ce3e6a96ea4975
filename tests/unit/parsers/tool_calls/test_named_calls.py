"""Named calls: the name between two markers, the arguments behind them."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather

from dynamo.parsers.base import CallBegin
from dynamo.parsers.registry import TOOL_CALLS

OSLO = '{"city": "Oslo"}'
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DEEP, DEEP_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def kimi(header: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deep(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def fenced(name: str, arguments: str) -> str:
    return deep("function", f"{name}\n```json\n{arguments}\n```")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A {KIMI}{kimi('functions.get_weather:0', OSLO)}{kimi('functions.now:1', '{}')}{KIMI_END} B",
         ("A  B", [weather(city="Oslo"), NOW])),
        (f"{KIMI.replace('calls', 'call')}{kimi(' functions.now:1 ', ' {} ')}{KIMI_END.replace('calls', 'call')}", ("", [NOW])),
        (f"A {kimi('functions.a.b:12', '{}')} B", ("A  B", [("a.b", {})])),
        (f"{KIMI}{kimi('now', '{}')}", ("", [NOW])),
        (f"A {KIMI}{kimi('functions.now:0', 'bad')}{KIMI_END} B", ("A  B", [NOW])),
        (f"A {KIMI}{kimi('functions.now:0', '')}{KIMI_END} B", ("A  B", [NOW])),
        (f"A {KIMI}{kimi('functions.:0', '{}')}{KIMI_END} B", ("A  B", [])),
        (f'A {KIMI}<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{{"x": "y', ("A ", [("now", {"x": "y"})])),
        (f"A {KIMI}<|tool_call_begin|>functions.now", ("A ", [])),
        (f"A {KIMI}<|tool_call_begin|>functions.now<|tool_call_end|>{kimi('now:1', '{}')}{KIMI_END} B", ("A  B", [NOW])),
        (f"A {KIMI} text {KIMI_END} B<|tool_call_end|>", ("A  B", [])),
    ],
)  # fmt: skip
def test_kimi_numbered_calls_are_parsed(text: str, expected: Found) -> None:
    assert found("kimi_k2", text) == expected


@pytest.mark.parametrize(
    ("header", "name", "call_id"),
    [("functions.now:3", "now", "functions.now:3"), ("now:3", "now", "now:3"), ("now", "now", None)],
)
def test_kimi_call_number_is_part_of_the_call_id(header: str, name: str, call_id: str | None) -> None:
    begin = TOOL_CALLS["kimi_k2"].make([]).feed(kimi(header, "{}"))[0]
    assert begin == CallBegin(0, name, call_id)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek_v3_1", f"A {DEEP}{deep('get_weather', OSLO)}{deep('now', '{}')}{DEEP_END} B",
         ("A  B", [weather(city="Oslo"), NOW])),
        ("deepseek_v3_1", f"A {deep('now', '{}')} B", ("A  B", [NOW])),
        ("deepseek_v3_1", f'{DEEP}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{{"city": "Os', ("", [weather(city="Os")])),
        ("deepseek_v3", f"A {DEEP}{fenced('get_weather', OSLO)}\n{fenced('now', '{}')}{DEEP_END} B",
         ("A  B", [weather(city="Oslo"), NOW])),
        ("deepseek_v3", f"{DEEP}{deep('function', 'now' + chr(10) + '{}')}{DEEP_END}", ("", [NOW])),
        ("deepseek_v3", f"{DEEP}{deep('function', '')}{DEEP_END} B", (" B", [])),
        ("deepseek_v3", f"{DEEP}<｜tool▁call▁begin｜>function<｜tool▁sep｜>no", ("", [])),
    ],
)  # fmt: skip
def test_deepseek_name_before_the_arguments_is_parsed(name: str, text: str, expected: Found) -> None:
    assert found(name, text) == expected
