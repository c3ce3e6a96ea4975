"""The events of a response, and the response they make."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.kv_events.found_events import answers, cut

from dynamo.api.responses.writer import ResponseWriter
from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from dynamo.protocols.responses import Response
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import TokenEntry

ID = "resp_" + "0a" * 16
USAGE = CompletionUsage(5, 3, 8, PromptTokensDetails(2), CompletionTokensDetails(1))


def writer(**options: Any) -> ResponseWriter:
    return ResponseWriter(Response(id=ID, created_at=1, model="m"), now=lambda: 9.0, **options)


class Choice:
    """A choice that ended."""

    def __init__(self, events: Sequence[Event], reason: str = "stop", entries: list[TokenEntry] | None = None) -> None:
        self.index = 0
        self.finish_reason: str | None = reason
        self.stop_reason: int | str | None = None
        self.entries = entries
        self._events = list(events)

    def text(self) -> str:
        return "".join(event.text for event in self._events if isinstance(event, ContentDelta))

    def events(self) -> list[Event]:
        return self._events


def stream(batches: Sequence[Sequence[Event]], reason: str = "stop", **options: Any) -> list[Any]:
    one = writer(**options)
    printed = one.begin(5) + one.first(0)
    for batch in batches:
        printed += one.events(0, batch, b"", (), 0)
    return read(printed + one.finish(0, reason, None) + one.usage(USAGE) + one.end())


def read(printed: bytes) -> list[Any]:
    """The events; the last must be [DONE], each must be named and numbered."""
    assert printed.endswith(b"data: [DONE]\n\n")
    events = []
    for number, block in enumerate(printed.decode().split("\n\n")[:-2]):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def assembled(events: list[Any]) -> list[Any]:
    """The output as a strict client assembles it, which accepts events only in their order."""
    output: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            continue
        if kind in ("created", "in_progress", "completed", "incomplete", "failed"):
            continue
        item = output[event["output_index"]]
        assert event["output_index"] == len(output) - 1, "an item is changed after the next one has begun"
        if kind == "output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            output[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item.setdefault("content", []).append(event["part"])
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            if kind == "output_text.delta":
                part["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
    return output


def test_text_events_follow_the_order_of_openai() -> None:
    events = stream([[ContentDelta("Hel")], [ContentDelta("lo")]])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    assert response["output"] == [{
        "type": "message", "role": "assistant", "id": "msg_" + "0a" * 12 + "00000000", "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }]  # fmt: skip
    assert response["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 8,
    }  # fmt: skip
    assert (response["status"], response["completed_at"]) == ("completed", 9)


def test_reasoning_and_tool_calls_are_separate_output_items() -> None:
    events = stream([[ReasoningDelta("hm"), CallBegin(0, "f", "call-1"), CallArguments(0, '{"a":1}')]])
    thought, call = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and thought["summary"] == []
    assert (call["call_id"], call["name"], call["arguments"]) == ("call-1", "f", '{"a":1}')
    assert thought["id"].startswith("rs_") and call["id"].startswith("fc_")


@given(st.data())
def test_response_stream_is_independent_of_chunking_and_equals_the_unary_response(data: st.DataObject) -> None:
    events = data.draw(answers())
    reason = data.draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))
    reported = stream(data.draw(cut(events)), reason)
    whole = json.loads(json_encode(writer().whole(Choice(events, reason), USAGE)))
    assert reported[-1]["response"] == whole
    assert assembled(reported) == whole["output"]


def test_empty_response_is_an_empty_message() -> None:
    (item,) = stream([])[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_truncated_response_is_incomplete_with_a_reason() -> None:
    last = stream([[ReasoningDelta("hm"), ContentDelta("and")]], "length")[-1]
    response = last["response"]
    assert last["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None
    filtered = stream([[ContentDelta("and")]], "content_filter")[-1]["response"]
    assert filtered["incomplete_details"] == {"reason": "content_filter"}


def test_failure_closes_open_items_and_contains_the_error() -> None:
    one = writer()
    printed = one.begin(5) + one.events(0, [ContentDelta("so far")], b"", (), 0)
    events = read(printed + one.failure(ErrorAnswer(500, "Internal server error")))
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert response["error"] == {"code": "server_error", "message": "Internal server error"}
    assert response["output"][0]["status"] == "incomplete"
    assert assembled(events) == response["output"]


def test_failure_before_any_output_creates_and_fails_the_response() -> None:
    events = read(writer().failure(ErrorAnswer(529, "busy")))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def entry(text: str) -> TokenEntry:
    return TokenEntry(7, text, text.encode(), -0.5, [("x", b"x", -1.5)])


def test_logprobs_are_sent_with_the_text_of_their_tokens() -> None:
    one = writer(logprobs=True)
    printed = one.begin(5) + one.events(0, [ContentDelta("a")], b"", [entry("a")], 0)
    printed += one.events(0, [], b"", [entry("b1")], 1)
    printed += (
        one.events(0, [ContentDelta("b")], b"", [entry("b2")], 3)
        + one.finish(0, "stop", None)
        + one.usage(USAGE)
        + one.end()
    )
    events = read(printed)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in delta] for delta in deltas] == [["a"], ["b1", "b2"]]
    assert deltas[0] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [{"token": "x", "logprob": -1.5, "bytes": [120]}],
        }
    ]
    whole = writer(logprobs=True).whole(
        Choice([ContentDelta("ab")], entries=[entry("a"), entry("b1"), entry("b2")]), USAGE
    )
    assert json.loads(json_encode(whole)) == events[-1]["response"]
    assert assembled(events) == events[-1]["response"]["output"]


def test_logprobs_cover_text_before_a_call_but_no_reasoning() -> None:
    entries = [entry("ab"), entry("<call>")]
    call = [CallBegin(0, "f", "c"), CallArguments(0, "{}")]
    whole = json.loads(
        json_encode(writer(logprobs=True).whole(Choice([ContentDelta("ab"), *call], entries=entries), USAGE))
    )
    assert [one["token"] for one in whole["output"][0]["content"][0]["logprobs"]] == ["ab"]
    thought = writer(logprobs=True).whole(Choice([ReasoningDelta("ab"), ContentDelta("c")], entries=entries), USAGE)
    assert json.loads(json_encode(thought))["output"][1]["content"][0]["logprobs"] == []


def test_completed_response_is_stored_and_a_failed_one_is_not() -> None:
    kept: list[Response] = []
    stream([[ContentDelta("x")]], keep=kept.append)
    assert [one.status for one in kept] == ["completed"]
    one = writer(keep=kept.append)
    one.begin(1)
    one.failure(ErrorAnswer(500, "x"))
    assert len(kept) == 1
