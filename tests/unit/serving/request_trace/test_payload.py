"""Reassembly of the bytes written to a client into one response."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.serving.request_trace import payload as request_trace_payload
from dynamo.serving.request_trace.payload import Tap, chat_response, last_response, message_response

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n"
STREAM = HEAD % b"text/event-stream"


class Transport:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 7


def tapped(*parts: bytes) -> Tap:
    tap = Tap(Transport())
    for part in parts:
        tap.write(part)
    return tap


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> dict[str, Any]:
    return {"id": "c-1", "created": 1, "model": "m", **fields}


def delta(index: int = 0, finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return event(choices=[{"index": index, "delta": fields, "finish_reason": finish, "logprobs": logprobs}])


def streamed(*events: dict[str, Any]) -> bytes:
    text = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events) + b"data: [DONE]\n\n"
    return chunk(text) + b"0\r\n\r\n"


def test_payload_tap_forwards_everything_to_the_transport() -> None:
    tap = tapped(b"one", b"two")
    assert tap._transport.sent == b"onetwo"
    assert tap.get_write_buffer_size() == 7


def test_payload_tap_returns_a_unary_response_unchanged() -> None:
    assert tapped(HEAD % b"application/json" + b'{"id": 1}').response(chat_response) == {"id": 1}


def test_payload_tap_merges_stream_chunks_into_one_completion() -> None:
    calls = [
        {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    tap = tapped(
        STREAM,
        streamed(
            delta(role="assistant", content="", reasoning_content="hm"),
            delta(content="Hel"),
            delta(1, content="other", logprobs={"content": [{"token": "o"}]}),
            delta(1, finish="stop", logprobs={"content": [{"token": "p"}]}),
            delta(content="lo"),
            *[delta(tool_calls=[call]) for call in calls],
            delta(finish="tool_calls"),
            event(choices=[], usage={"total_tokens": 3}),
        ),
    )
    answer = tap.response(chat_response)
    first, second = answer["choices"]
    assert first["message"] == {
        "content": "Hello",
        "refusal": None,
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert [one["token"] for one in second["logprobs"]["content"]] == ["o", "p"]
    assert (answer["object"], answer["usage"]) == ("chat.completion", {"total_tokens": 3})


def test_payload_tap_uses_the_last_event_of_a_responses_stream() -> None:
    tap = tapped(STREAM, streamed({"type": "a"}, {"type": "response.completed", "response": {"id": "r"}}))
    assert tap.response(last_response) == {"id": "r"}


def test_payload_tap_merges_the_events_of_an_anthropic_message() -> None:
    tap = tapped(
        STREAM,
        streamed(
            {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": {"input_tokens": 3}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "input": {}}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
            {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ":1}"}},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ),
    )
    assert tap.response(message_response) == {
        "id": "msg_1",
        "content": [{"type": "text", "text": "Hello"}, {"type": "tool_use", "id": "t", "input": {"a": 1}}],
        "usage": {"input_tokens": 3, "output_tokens": 2},
        "stop_reason": "tool_use",
    }
    assert tapped(STREAM, streamed({"type": "ping"})).response(message_response) is None


def test_payload_tap_returns_none_for_an_incomplete_or_oversized_response(monkeypatch: Any) -> None:
    assert tapped().response(chat_response) is None
    assert tapped(STREAM, b"0\r\n\r\n").response(chat_response) is None
    monkeypatch.setattr(request_trace_payload, "KEPT_BYTES_MAX", 10)
    tap = tapped(HEAD % b"application/json", b"{}")
    assert tap.response(chat_response) is None
    assert tap._transport.sent.endswith(b"{}")


@given(st.text(), st.lists(st.integers(1, 60), max_size=8))
def test_payload_tap_result_is_independent_of_chunk_boundaries(text: str, cuts: list[int]) -> None:
    data = b"".join(b"data: " + json.dumps(delta(content=letter)).encode() + b"\n\n" for letter in text)
    parts, place = [], 0
    for cut in cuts:
        parts.append(data[place : place + cut])
        place += cut
    parts.append(data[place:])
    tap = tapped(STREAM, *[chunk(part) for part in parts if part], b"0\r\n\r\n")
    answer = tap.response(chat_response)
    assert (answer["choices"][0]["message"]["content"] if text else answer) == (text or None)
