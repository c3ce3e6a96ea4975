"""Defaults of requests without values of their own."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.text.request_template import RequestTemplate

TEMPLATE = RequestTemplate(model="m", temperature=0.5, max_completion_tokens=7)


def filled(request: object, limit: str = "max_tokens") -> object:
    return json.loads(TEMPLATE.fill(json.dumps(request).encode(), limit))


def test_request_template_fills_in_missing_fields() -> None:
    assert filled({}) == {"model": "m", "temperature": 0.5, "max_tokens": 7}
    assert filled({"model": None}, "max_completion_tokens") == {
        "model": "m",
        "temperature": 0.5,
        "max_completion_tokens": 7,
    }


def test_request_template_keeps_fields_of_the_client() -> None:
    output = {"model": "x", "temperature": 0, "max_completion_tokens": 1}
    assert filled(output) == output
    assert filled({**output, "stream": True}) == {**output, "stream": True}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff"])
def test_request_template_ignores_bodies_that_are_not_requests(body: bytes) -> None:
    assert TEMPLATE.fill(body, "max_tokens") == body


def test_request_template_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text('{"model": "m", "temperature": 0.5, "max_completion_tokens": 7}')
    assert RequestTemplate.read(str(path)) == TEMPLATE


@pytest.mark.parametrize(
    "text", ["", "[]", '{"modle": "m"}', '{"temperature": 3}', '{"max_completion_tokens": 0}', '{"model": 1}']
)
def test_request_template_error_names_the_field(tmp_path: Path, text: str) -> None:
    path = tmp_path / "template.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--request-template"):
        RequestTemplate.read(str(path))
    with pytest.raises(ConfigError, match="--request-template"):
        RequestTemplate.read(str(tmp_path / "none.json"))
