"""GLM format of tool calls: alternating keys and values."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather


def glm(name: str, between: str = "", **values: str) -> str:
    pairs = [f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in values.items()]
    return f"<tool_call>{between.join([name, *pairs])}{between}</tool_call>"


@pytest.mark.parametrize("name", ["glm45", "glm47"])
@pytest.mark.parametrize("between", ["", "\n"])
def test_glm_calls_on_one_or_several_lines_are_parsed(name: str, between: str) -> None:
    text = glm("get_weather", between, city="Oslo", days="2", note="null", sunny="false")
    assert found(name, f"A {text}\n{glm('now', between)} B") == (
        "A  B",
        [weather(city="Oslo", days=2, note=None, sunny=False), NOW],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (glm("get_weather", city=" a &lt;\nb "), ("", [weather(city=" a &lt;\nb ")])),
        (glm("now", x="5", y='{"z": [1]}', z="[1,2"), ("", [("now", {"x": "5", "y": {"z": [1]}, "z": "[1,2"})])),
        ("A <tool_call></tool_call>B", ("A B", [])),
        ("A <tool_call>now", ("A ", [])),
        ("A <tool_call>now<arg_key>x</arg_key><arg_value>1", ("A ", [NOW])),
        ("A <tool_call>get_weather<arg_key>city</arg_key><arg_value>Os", ("A ", [weather(city="Os")])),
        ("A <tool_call>now<arg_key>x</arg_key></tool_call> B", ("A  B", [NOW])),
        ("A <tool_call>now<arg_key></arg_key><arg_value>1</arg_value></tool_call> B", ("A  B", [NOW])),
        ("<tool_call>now<arg_key>x<arg_key>y</arg_key><arg_value>1</tool_call>", ("", [("now", {"y": "1"})])),
        ("A <tool_call>now<tool_call>now</tool_call> B", ("A  B", [NOW])),
        (
            "A <tool_call>now<arg_key>x</arg_key><arg_value>1<tool_call>now</tool_call>",
            ("A ", [("now", {"x": "1"}), NOW]),
        ),
        ("A </arg_value> B </tool_call>", ("A  B ", [])),
    ],
)
def test_glm_missing_tag_affects_only_its_element(text: str, expected: Found) -> None:
    assert found("glm47", text) == expected
