"""The picture of a terminal session."""

from xml.etree import ElementTree as ET

from tools import session_picture


def test_lines_are_wrapped_and_escaped_in_the_picture() -> None:
    lines = session_picture.lines_of("program", f"<a>\n\n{'word ' * 40}")
    assert lines[:3] == ["$ program", "<a>", ""]
    assert all(len(line) <= session_picture.COLUMNS for line in lines)
    picture = ET.fromstring(session_picture.draw(lines))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["$ program", "<a>"]


def test_committed_picture_is_valid() -> None:
    texts = [one.text or "" for one in ET.parse(session_picture.PICTURE).iter()]
    assert "$ .venv/bin/dynamo chat" in texts
