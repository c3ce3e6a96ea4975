"""What requests ask for that do not say so themselves."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.text.request_template import RequestTemplate

TEMPLATE = RequestTemplate(model="m", temperature=0.5, max_completion_tokens=7)


def filled(request: object, limit: str = "max_tokens") -> object:
    return json.loads(TEMPLATE.fill(json.dumps(request).encode(), limit))


def test_what_is_missing_is_filled_in() -> None:
    assert filled({}) == {"model": "m", "temperature": 0.5, "max_tokens": 7}
    assert filled({"model": None}, "max_completion_tokens") == {
        "model": "m",
        "temperature": 0.5,
        "max_completion_tokens": 7,
    }


def test_what_the_client_says_stays() -> None:
    said = {"model": "x", "temperature": 0, "max_completion_tokens": 1}
    assert filled(said) == said
    assert filled({**said, "stream": True}) == {**said, "stream": True}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
def test_what_is_no_request_stays_as_it_is(body: bytes) -> None:
    assert TEMPLATE.fill(body, "max_tokens") == body


def test_a_template_is_read(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text('{"model": "m", "temperature": 0.5, "max_completion_tokens": 7}')
    assert RequestTemplate.read(str(path)) == TEMPLATE


@pytest.mark.parametrize(
    "text", ["", "[]", '{"modle": "m"}', '{"temperature": 3}', '{"max_completion_tokens": 0}', '{"model": 1}']
)
def test_a_wrong_template_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "template.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--request-template"):
        RequestTemplate.read(str(path))
    with pytest.raises(ConfigError, match="--request-template"):
        RequestTemplate.read(str(tmp_path / "none.json"))
