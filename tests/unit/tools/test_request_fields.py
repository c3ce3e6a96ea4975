"""The description of every field in docs/request-fields.md."""

from tools import request_fields


def test_request_fields_page_equals_the_tool_output() -> None:
    text = request_fields.PAGE.read_text(encoding="utf-8")
    assert request_fields.tables() in text, "python tools/request_fields.py writes it"
