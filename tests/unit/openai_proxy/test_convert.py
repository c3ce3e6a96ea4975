"""Convert: text requests to a server, and the decoding of its chunks and errors."""

import json
from typing import Any

import pytest

from dynamo.core.errors import HttpError, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.openai_proxy.convert import ChunkConverter, message_of, refusal, text_request

CHAT: dict[str, Any] = {"model": "ours", "messages": [{"role": "user", "content": "hi"}]}


def test_request_is_forwarded_with_the_model_name_of_the_server() -> None:
    given = {**CHAT, "temperature": 0.5, "tools": [{"type": "function"}], "nvext": {"ignore_eos": True}}
    requested = text_request(given, "theirs")
    assert requested.path == "/chat/completions"
    assert requested.body == {
        **CHAT, "model": "theirs", "temperature": 0.5, "tools": [{"type": "function"}],
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert given["model"] == "ours"


@pytest.mark.parametrize(
    ("given", "path", "streams"),
    [
        ({"prompt": "a"}, "/completions", True),
        ({"prompt": [1, 2]}, "/completions", True),
        ({"input": "a"}, "/embeddings", False),
    ],
)
def test_request_fields_select_the_path(given: dict[str, Any], path: str, streams: bool) -> None:
    requested = text_request(given, "m")
    assert (requested.path, requested.is_stream, "stream" in requested.body) == (path, streams, streams)


@pytest.mark.parametrize("given", [{}, {"stream_options": [1], "prompt": "a"}])
def test_malformed_request_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        text_request(given, "m")


@pytest.mark.parametrize(
    ("more", "drops"),
    [({}, False), ({"stream": True}, True), ({"stream": True, "stream_options": {"include_usage": True}}, False)],
)
def test_usage_is_removed_from_streams_without_a_usage_request(more: dict[str, Any], drops: bool) -> None:
    chunks = ChunkConverter(text_request({**CHAT, **more}, "m"), "ours")
    outputs_of = chunks.take({"choices": [], "usage": {"total_tokens": 3}})
    assert (outputs_of is None) is drops
    last = chunks.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"total_tokens": 3}})
    assert last is not None
    assert ("usage" in last) is not drops


def test_chunks_have_the_served_model_name_and_finish_with_every_choice() -> None:
    chunks = ChunkConverter(text_request({**CHAT, "n": 2}, "theirs"), "ours")
    for index in (1, 0):
        assert not chunks.is_finished
        outputs_of = chunks.take(
            {"model": "theirs", "choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}
        )
        assert outputs_of is not None
        assert outputs_of["model"] == "ours"
    assert chunks.is_finished


def test_unary_message_is_converted_to_a_chunk() -> None:
    chunks = ChunkConverter(text_request(CHAT, "m"), "ours")
    message = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}, {"id": "2"}]}
    outputs_of = chunks.take({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    assert outputs_of is not None
    assert outputs_of["choices"][0]["delta"]["content"] == "x"
    assert [call["index"] for call in outputs_of["choices"][0]["delta"]["tool_calls"]] == [0, 1]


def test_reasoning_field_is_renamed() -> None:
    chunks = ChunkConverter(text_request(CHAT, "m"), "ours")
    outputs_of = chunks.take({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]})
    assert outputs_of is not None
    assert outputs_of["choices"][0]["delta"] == {"reasoning_content": "hm"}


def test_stream_error_is_raised() -> None:
    chunks = ChunkConverter(text_request(CHAT, "m"), "ours")
    with pytest.raises(HttpError, match="too long") as caught:
        chunks.take({"error": {"message": "too long", "code": 400}})
    assert caught.value.code == 400
    with pytest.raises(WorkerUnavailable):
        chunks.take({"error": {"message": "gone", "code": 503}})
    with pytest.raises(HttpError, match="bad"):
        chunks.take({"error": "bad"})
    with pytest.raises(Unknown):
        chunks.take([1])


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no such thing", "type": "x"}},
        {"object": "error", "message": "no such thing", "code": 400},
        {"detail": "no such thing"},
        {"error": "no such thing"},
        "no such thing",
    ],
)
def test_refusal_message_is_read_from_every_body_format(body: Any) -> None:
    assert message_of(json.dumps(body).encode()) == "no such thing"
    assert message_of(b"no such thing\n") == "no such thing"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
def test_refusal_keeps_its_status(status: int) -> None:
    error = refusal(status, b'{"message": "why"}')
    assert isinstance(error, HttpError)
    assert (error.code, error.message) == (status, "why")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_unavailable_server_is_a_retryable_error(status: int) -> None:
    error = refusal(status, b"")
    assert error.retry_elsewhere
    assert str(status) in str(error)
