"""What docs/request-fields.md says of every field."""

from tools import request_fields


def test_request_fields_page_is_what_the_tool_writes() -> None:
    text = request_fields.PAGE.read_text(encoding="utf-8")
    assert request_fields.tables() in text, "python tools/request_fields.py writes it"
