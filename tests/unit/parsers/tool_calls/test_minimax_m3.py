"""MiniMax M3: parameters named by their tags, one inside the other."""

import pytest
from tests.unit.parsers.tool_calls.cases import NOW, Found, found, weather


def m3(text: str) -> str:
    return text.replace("<", "]<]minimax[>[<")


def call(name: str, inner: str) -> str:
    return f'<invoke name="{name}">{inner}</invoke>'


def block(*calls: str) -> str:
    return f"<tool_call>\n{''.join(calls)}\n</tool_call>"


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("<city>2</city><days>2</days><sunny>true</sunny>", weather(city="2", days=2, sunny=True)),
        ("<tags><item>a</item><item>b</item></tags>", weather(tags=["a", "b"])),
        ("<tags>a</tags><tags>b</tags><days>1</days>", weather(tags=["a", "b"], days=1)),
        ('<tags>["a"]</tags>', weather(tags=["a"])),
        ("<place><lat>1.5</lat><name>2</name></place>", weather(place={"lat": 1.5, "name": "2"})),
        ("<x><item>a</item></x><y><z>1</z>t<z>2</z></y>", weather(x=["a"], y={"z": ["1", "2"], "$text": "t"})),
        ("<city>a<b>c</b>d</city>", weather(city="acd")),
        ("<note>null</note>", weather(note=None)),
        ("<days>1<city>x</city>", weather(days={"city": "x", "$text": "1"})),
        ("</days><days>1</days>", weather(days=1)),
        ("", weather()),
    ],
)
def test_minimax_m3_nested_tags_become_objects_and_arrays(inner: str, expected: object) -> None:
    assert found("minimax_m3", m3(block(call("get_weather", inner)))) == ("", [expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "A " + m3(block(call("now", ""), call("now", "")) + "\n" + block(call("now", ""))) + " B",
            ("A  B", [NOW] * 3),
        ),
        ("A " + m3('<tool_call><invoke name="get_weather"><city>Os'), ("A ", [weather(city="Os")])),
        ("A " + m3('<tool_call><invoke name="get_weather"><days>1</days><days>2'), ("A ", [weather(days=1)])),
        ("A " + m3('<tool_call><invoke name="now"></tool_call>') + " B", ("A  B", [NOW])),
        ("A " + m3("<tool_call><invoke></invoke></tool_call>") + " B", ("A  B", [])),
        ("A " + m3("</tool_call>") + " B", ("A  B", [])),
        ("A ]<]minimax[>[B", ("A B", [])),
        ("A ]<]minimax[>[<B", ("A <B", [])),
        ("A <tool_call> B", ("A <tool_call> B", [])),
        (m3(block(call("now", "<a>" * 100 + "x" + "</a>" * 100)))[:40], ("", [])),
    ],
)
def test_minimax_m3_missing_tag_affects_only_its_element(text: str, expected: Found) -> None:
    assert found("minimax_m3", text) == expected


def test_minimax_m3_tags_beyond_the_depth_limit_are_dropped() -> None:
    content, calls = found("minimax_m3", m3(block(call("now", "<a>" * 100 + "x" + "</a>" * 100))))
    assert content == ""
    assert str(calls).count("'a'") == 32
