"""Parsers page: it shows every family as it is."""

from tools.parsers_page import PAGE, page

from dynamo.parsers.registry import REASONING, TOOL_CALLS


def test_parsers_page_equals_the_tool_output() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run tools/parsers_page.py (make format does)"


def test_parsers_page_names_every_parser() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in (*TOOL_CALLS, *REASONING) if f"`{name}`" not in text] == []
