"""Validation of batch input files."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.api.batches import lines
from dynamo.api.batches.lines import ENDPOINTS, BatchLine, LineBody, check_line, read_line, review
from dynamo.core.errors import InvalidArgument

CHAT = "/v1/chat/completions"


def line(**changes: Any) -> bytes:
    given = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in given.items() if value is not ...}).encode()


def test_valid_batch_file_is_counted_and_has_one_model() -> None:
    found = review([line(), b"\n", line(custom_id="b") + b"\n"], CHAT)
    assert (found.total, found.model, found.errors) == (2, "m", [])
    assert bytes(read_line(line(extra=1)).body) == b'{"model": "m"}'


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"x":' + b"[" * 5000, "invalid_json_line"),
        (b"[]", "invalid_request"),
        (line(custom_id=...), "invalid_request"),
        (line(custom_id=1), "invalid_request"),
        (line(body="x"), "invalid_request"),
        (line(custom_id=""), "invalid_custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_url"),
        (line(body={}), "missing_model"),
        (line(body={"model": 1}), "missing_model"),
        (line(body={"model": "m", "stream": True}), "stream_not_supported"),
    ],
)
def test_invalid_line_is_reported_with_its_number(data: bytes, code: str) -> None:
    found = review([line(custom_id="first"), data], CHAT)
    assert [(error.code, error.line) for error in found.errors] == [(code, 2)]


def test_line_that_the_check_refuses_is_reported_and_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> None:
        if b"slow" in data:
            raise InvalidArgument("the body has more than 9 objects and lists")

    decoded: list[bytes] = []

    def decode(data: bytes) -> BatchLine:
        decoded.append(data)
        return BatchLine("a", "POST", CHAT, LineBody(msgspec.Raw(b'"m"')))

    monkeypatch.setattr(lines, "_decode", decode)
    [error] = review([line(custom_id="slow"), line()], CHAT, refuse).errors
    assert (error.code, error.line) == ("invalid_request", 1)
    assert error.message == "the body has more than 9 objects and lists"
    assert decoded == [line()]


def test_duplicate_custom_id_is_refused() -> None:
    found = review([line(), line(), line()], CHAT)
    assert [error.line for error in found.errors] == [2, 3]


def test_empty_and_oversized_batch_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [error.code for error in review([b"\n"], CHAT).errors] == ["empty_file"]
    monkeypatch.setattr(lines, "LINES_MAX", 2)
    found = review([line(custom_id=str(place)) for place in range(9)], CHAT)
    assert [(error.code, error.line) for error in found.errors] == [("too_many_tasks", 3)]


def test_reported_line_errors_are_bounded() -> None:
    assert len(review([b"{"] * 1000, CHAT).errors) == lines.ERRORS_MAX


@given(st.binary())
def test_any_line_is_either_read_or_reported_as_invalid(data: bytes) -> None:
    error, one = check_line(data, ENDPOINTS[0], set())
    assert (error is None) != (one is None)


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ('"model":"m","x":[[1,{"model":7}],[]]', None),
        ('"model":"m","stream":false', None),
        ('"model":"m","stream":null', None),
        ('"model":"m","stream":true', "stream_not_supported"),
        ('"model":"m","stream":[' + "0," * 5000 + "0]", "stream_not_supported"),
        ('"model":7', "missing_model"),
        ('"model":""', "missing_model"),
        ('"model":"' + "m" * 5000 + '"', "missing_model"),
        ('"x":1', "missing_model"),
    ],
)
def test_fields_of_a_body_are_checked_without_decoding_the_others(members: str, code: str | None) -> None:
    url = "/v1/chat/completions"
    line = f'{{"custom_id":"a","method":"POST","url":"{url}","body":{{{members}}}}}'.encode()
    found = review([line], url)
    assert [one.code for one in found.errors] == ([] if code is None else [code])
    if code is None:
        assert found.model == "m"
