"""Tagged calls: a tag for the call and one for each parameter."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather

from dynamo.parsers.base import CallArguments, Tool
from dynamo.parsers.registry import TOOL_CALLS


def qwen(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def minimax(name: str, **values: str) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>' for key, value in values.items())
    return f'<minimax:tool_call><invoke name="{name}">{inner}</invoke></minimax:tool_call>'


def dsml(inner: str, block: str = "tool_calls") -> str:
    return f"<｜DSML｜{block}>\n{inner}\n</｜DSML｜{block}>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"city": "2"}, weather(city="2")),
        ({"days": "2", "sunny": "True"}, weather(days=2, sunny=True)),
        ({"days": "two"}, weather(days="two")),
        ({"tags": '["a", "b"]', "place": '{"lat": 1.5}'}, weather(tags=["a", "b"], place={"lat": 1.5})),
        ({"tags": "a, b", "place": "{'lat': None}"}, weather(tags="a, b", place={"lat": None})),
        ({"note": "null"}, weather(note=None)),
        ({"note": "nullable"}, weather(note="nullable")),
        ({"note": ""}, weather(note="")),
        ({"note": "   "}, weather(note="   ")),
        ({"city": "null", "other": "5"}, weather(city="null", other="5")),
        ({"city": " a &lt; \n\n b \n"}, weather(city=" a &lt; \n\n b \n")),
        ({}, weather()),
    ],
)
def test_tagged_values_are_converted_by_the_tool_schema(text: dict[str, str], expected: object) -> None:
    assert found("qwen3_coder", qwen("get_weather", **text)) == ("", [expected])
    assert found("qwen3", qwen("get_weather", **text)) == ("", [expected])
    assert found("minimax_m2", minimax("get_weather", **text)) == ("", [expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A " + qwen("now") + "\n" + qwen("now") + " B", ("A  B", [NOW, NOW])),
        ("A <tool_call><function=now></function><function=now></function></tool_call> B", ("A  B", [NOW, NOW])),
        ("A <function=now>\n<parameter=x>\n1\n</parameter>\n</function> B", ("A  B", [("now", {"x": "1"})])),
        (
            "A <tool_call>\n<function=now>\n<parameter=x>\n1\n</function>\n</tool_call> B",
            ("A  B", [("now", {"x": "1"})]),
        ),
        ("A <tool_call>\n<function=now>\n<parameter=x>\n1", ("A ", [("now", {"x": "1"})])),
        ("A <tool_call>\n<function=now>\n<parameter=x>\n", ("A ", [NOW])),
        ("A <tool_call>\n<function=get_weather>\n<parameter=days>\n1", ("A ", [weather()])),
        ("A <tool_call>\n<function=no", ("A ", [])),
        ("A <tool_call>\n<function=no\nw></function></tool_call> B", ("A  B", [])),
        ("A <tool_call>\n<function=now>\n<parameter=\n>1</parameter></function></tool_call> B", ("A  B", [NOW])),
        ("A <tool_call>\n<function=now><tool_call><function=now></tool_call> B", ("A  B", [NOW, NOW])),
        ("A <tool_call>\nfoo\n</tool_call> B", ("A  B", [])),
        ("A </tool_call> </function> B", ("A  </function> B", [])),
        (qwen("now") + "</function>\n</parameter> B", ("\n B".strip("\n"), [NOW])),
        ("<function=" + "x" * 600 + "></function>", ("", [])),
    ],
)
def test_missing_or_extra_tags_lose_no_call(text: str, expected: Found) -> None:
    content, calls = found("qwen3_coder", text)
    assert (content, calls) == expected


def test_tagged_string_value_is_streamed() -> None:
    parser = TOOL_CALLS["qwen3_coder"].make([Tool("f", {"properties": {"x": {"type": "string"}}})])
    parser.feed("<tool_call><function=f><parameter=x>\nline")
    assert parser.feed(" one\n") == [CallArguments(0, " one")]
    assert parser.feed('"two"') == [CallArguments(0, '\\n\\"two\\"')]


def test_minimax_keeps_line_breaks_at_the_ends_of_a_value() -> None:
    assert found("minimax_m2", minimax("get_weather", city="\na\n")) == ("", [weather(city="\na\n")])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek_v3_2", dsml('<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', "function_calls"), [NOW]),
        (
            "deepseek_v4",
            dsml(
                '<｜DSML｜invoke name="get_weather">'
                '<｜DSML｜parameter name="city" string="true">2</｜DSML｜parameter>'
                '<｜DSML｜parameter name="note" string="false">null</｜DSML｜parameter>'
                '<｜DSML｜parameter name="tags" string="false">["a"]</｜DSML｜parameter>'
                '<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>'
                '<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>'
                '<｜DSML｜parameter name="c">5</｜DSML｜parameter>'
                '<｜DSML｜parameter name="d" string="false">five</｜DSML｜parameter></｜DSML｜invoke>'
            ),
            [weather(city="2", note=None, tags=["a"], a="5", b=5, c=5, d="five")],
        ),
        ("deepseek_v4", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', [NOW]),
        ("deepseek_v4", dsml('<｜DSML｜invoke name="now">\n{"x": 1}\n</｜DSML｜invoke>'), [("now", {"x": 1})]),
        (
            "deepseek_v41",
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now">\n{"x": 1}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
            [("now", {"x": 1})],
        ),
    ],
)
def test_dsml_string_attribute_is_applied(name: str, text: str, expected: object) -> None:
    assert found(name, text) == ("", expected)


ATEM = '<atem:function_calls><atem:invoke name="now">{}</atem:invoke></atem:function_calls>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f" to=now<|message|>{ATEM.format('')}<|eot|>", ("", [NOW])),
        (
            f"<|start|>assistant to=user<|message|>Hi.<|eom|><|start|>assistant to=now<|message|>{ATEM.format('')}",
            ("Hi.", [NOW]),
        ),
        (f"Hi. to=now<|message|>{ATEM.format('')}", ("Hi. ", [NOW])),
        ("Go to=there, to=", ("Go to=there, to=", [])),
        (
            ATEM.format('<atem:parameter name="x">5</atem:parameter><atem:parameter name="y">[x</atem:parameter>'),
            ("", [("now", {"x": 5, "y": "[x"})]),
        ),
        ("A <|start|>assistant", ("A ", [])),
    ],
)
def test_muse_call_recipient_is_the_tool_name(text: str, expected: Found) -> None:
    assert found("muse", text) == expected


def test_qwen3_parses_both_call_formats() -> None:
    assert found("qwen3", qwen("now") + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>') == ("", [NOW, NOW])
    assert found("qwen3", "A <tool_call>what</tool_call> <function=now></function> B") == ("A  B", [NOW])
