"""JSON calls: objects with a tool's name in them, in the marks of each family or in none."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather

W = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
N = '{"name": "now", "arguments": {}}'
OSLO = weather(city="Oslo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A <tool_call>{W}</tool_call> B <tool_call>{N}</tool_call> C", ("A  B  C", [OSLO, NOW])),
        (f"<tool_call>{W}</tool_call>\n<tool_call>{N}</tool_call>\n", ("", [OSLO, NOW])),
        (f"<tool_call>{W}{N}</tool_call>", ("", [OSLO, NOW])),
        (f"<tool_call>[{W}, {N}]</tool_call>", ("", [OSLO, NOW])),
        ('<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>', ("", [OSLO])),
        ('<tool_call>{"name": "get_weather", "parameters": {"city": "Oslo"}}</tool_call>', ("", [OSLO])),
        ('<tool_call>{"id": 1, "name": "now", "type": ["f"]}</tool_call>', ("", [NOW])),
        ('<tool_call>{"name": "now", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("now", {"x": 1})])),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', ("", [NOW])),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', ("", [NOW])),
        (
            '<tool_call>{"name": "now", "arguments": {"x": "</tool_call>"}}</tool_call>',
            ("", [("now", {"x": "</tool_call>"})]),
        ),
        ('<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>', ("", [("no_such_tool", {})])),
    ],
)
def test_json_call_fields_may_be_in_any_order(text: str, expected: Found) -> None:
    assert found("hermes", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A <tool_call>{W}", ("A ", [OSLO])),
        ('A <tool_call>{"name": "get_weather", "arguments": {"city": "Os', ("A ", [weather(city="Os")])),
        ('A <tool_call>{"name": "get_weather", "arguments": {"ci', ("A ", [weather()])),
        ('A <tool_call>{"name": "get_weather", "argu', ("A ", [])),
        ('A <tool_call>{"name": "get_wea', ("A ", [])),
        ("A <tool_call>", ("A ", [])),
        ("A <tool_ca", ("A <tool_ca", [])),
    ],
)
def test_truncated_json_call_is_closed_after_its_arguments_started(text: str, expected: Found) -> None:
    assert found("hermes", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A <tool_call>{"name": "now", "arguments": {bad}</tool_call> B', ("A  B", [NOW])),
        ('A <tool_call>{"name": 7, "arguments": {}}</tool_call> B', ("A  B", [])),
        ('A <tool_call>{"name": "", "arguments": {}}</tool_call> B', ("A  B", [])),
        ("A <tool_call>{7}</tool_call> B", ("A  B", [])),
        ("A <tool_call>text</tool_call> B", ("A  B", [])),
        ("A <tool_call>\n\n</tool_call> B", ("A  B", [])),
        (f"A <tool_call>text<tool_call>{N}</tool_call> B", ("A  B", [NOW])),
        ("A </tool_call> B", ("A  B", [])),
        ("A <tool<tool_call></tool_call>_call> B", ("A <tool B", [])),
    ],
)
def test_malformed_json_call_is_dropped_up_to_the_next_marker(text: str, expected: Found) -> None:
    assert found("hermes", text) == expected


@pytest.mark.parametrize(
    "name", ["hermes", "default", "nemotron_deci", "llama3_json", "mistral", "jamba", "phi4", "qwen3"]
)
def test_json_call_without_a_marker_must_name_a_tool_of_the_request(name: str) -> None:
    assert found(name, f"A {W} B") == ("A  B", [OSLO])
    assert found(name, f"[{W},\n{N}]") == ("", [OSLO, NOW])
    for text in (
        '{"name": "other", "arguments": {}}',
        '{"name": "now"}',
        '[{"a": 1}]',
        '{"name": "now", "arguments": [',
        "[]",
    ):
        assert found(name, f"A {text} B") == (f"A {text} B", [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3_json", f"<|python_tag|>{W};{N}", ("", [OSLO, NOW])),
        ("llama3_json", f"<|python_tag|>{W} tail", (" tail", [OSLO])),
        ("llama3_json", "A <|python_tag|>print(1)", ("A print(1)", [])),
        ("default", f"A <TOOLCALL>[{W}]</TOOLCALL> B", ("A  B", [OSLO])),
        ("default", f"A <|python_tag|>{W} B", ("A  B", [OSLO])),
        ("nemotron_deci", "A <TOOLCALL>[]</TOOLCALL> B", ("A  B", [])),
        ("nemotron_deci", f"A [{W}]</TOOLCALL> B", ("A  B", [OSLO])),
        ("jamba", f"A <tool_calls>[{W},{N}]</tool_calls> B", ("A  B", [OSLO, NOW])),
        ("phi4", f"A functools[{W}, {N}] B", ("A  B", [OSLO, NOW])),
        ("phi4", "functools are nice", ("functools are nice", [])),
        ("mistral", f"A [TOOL_CALLS][{W}][/TOOL_CALLS] B", ("A  B", [OSLO])),
        ("mistral", f"A [TOOL_CALLS] {W} B", ("A  B", [OSLO])),
        ("mistral", 'A [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now{}', ("A ", [OSLO, NOW])),
        ("mistral", 'A [TOOL_CALLS]now[CALL_ID]123[ARGS]{"x": 1}', ("A ", [("now", {"x": 1})])),
        ("mistral", "A [TOOL_CALLS] text", ("A  text", [])),
    ],
)
def test_json_call_markers_of_every_family_are_parsed(name: str, text: str, expected: Found) -> None:
    assert found(name, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('now<|content_invoke_tool_json|>{"name": "now", "args": {"x": 1}}<|end_message|>', ("", [("now", {"x": 1})])),
        ("<|content_text|>Hi<|end_message|><|content_model_end_sampling|>", ("Hi", [])),
        (
            '<|content_text|>Hi.<|end_message|><|message_model|>now<|content_invoke_tool_json|>{"name": "now"}<|end_message|>',
            ("Hi.", [NOW]),
        ),
        ("<|message_model|>word <|content_text|>Hi", ("word Hi", [])),
        (N, (N, [])),
    ],
)
def test_inkling_call_with_a_name_before_the_object_is_parsed(text: str, expected: Found) -> None:
    assert found("inkling", text) == expected
