"""The events of a message, and the message they make."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.kv_events.found_events import answers, cut

from dynamo.api.anthropic.convert import SEALED
from dynamo.api.anthropic.writer import MessageWriter
from dynamo.api.sealed_text import unsealed
from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import TokenEntry

USAGE = CompletionUsage(5, 3, 8, PromptTokensDetails(2))


class Choice:
    """A choice that ended."""

    def __init__(self, events: Sequence[Event], reason: str = "stop", stop_reason: int | str | None = None) -> None:
        self.index = 0
        self.finish_reason: str | None = reason
        self.stop_reason = stop_reason
        self.entries: list[TokenEntry] | None = None
        self._events = list(events)

    def text(self) -> str:
        return "".join(event.text for event in self._events if isinstance(event, ContentDelta))

    def events(self) -> list[Event]:
        return self._events


def stream(
    batches: Sequence[Sequence[Event]], reason: str = "stop", stop_reason: Any = None, **options: Any
) -> list[Any]:
    one = MessageWriter("msg_1", "m", **options)
    output = one.begin(5) + one.first(0)
    for batch in batches:
        output += one.events(0, batch, b"", (), 0)
    return read(output + one.finish(0, reason, stop_reason) + one.usage(USAGE) + one.end())


def read(output: bytes) -> list[Any]:
    events = []
    for block in output.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def whole(events: Sequence[Event], reason: str = "stop", stop_reason: Any = None, **options: Any) -> Any:
    return json.loads(
        json_encode(MessageWriter("msg_1", "m", **options).whole(Choice(events, reason, stop_reason), USAGE))
    )


def assembled(events: list[Any]) -> Any:
    """The message as a strict client assembles it, which accepts events only in their order."""
    start, *rest = events
    message = start["message"]
    is_open = False
    arguments: dict[int, str] = {}
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                assert is_open
                is_open = False
                if event["index"] in arguments:
                    message["content"][-1]["input"] = json.loads(arguments[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
            case "message_stop":
                assert event is events[-1] and not is_open
            case other:
                assert other == "ping"
    return message


def test_text_events_follow_the_order_of_anthropic() -> None:
    events = stream([[ContentDelta("Hel")], [ContentDelta("lo")]])
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert events[-2] == {
        "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {
            "input_tokens": 3, "output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
        },
    }  # fmt: skip


@given(st.data())
def test_anthropic_stream_is_independent_of_chunking_and_equals_the_unary_message(data: st.DataObject) -> None:
    events = data.draw(answers())
    options = {"hides_thoughts": data.draw(st.booleans())}
    reason = data.draw(st.sampled_from(["stop", "length", "tool_calls"]))
    assert assembled(stream(data.draw(cut(events)), reason, **options)) == whole(events, reason, **options)


def test_reasoning_blocks_have_a_signature_and_tool_blocks_their_input() -> None:
    message = whole([ReasoningDelta("hm"), CallBegin(0, "f", "call-0a-0b"), CallArguments(0, '{"a":1}')], "tool_calls")
    thought, call = message["content"]
    assert thought["thinking"] == "hm" and thought["signature"]
    assert call == {"type": "tool_use", "id": "toolu_0a0b", "name": "f", "input": {"a": 1}}
    assert message["stop_reason"] == "tool_use"


def test_tool_call_id_of_the_model_is_kept() -> None:
    (call,) = whole([CallBegin(0, "f", "functions.f:0")])["content"]
    assert (call["id"], call["input"]) == ("functions.f:0", {})


def test_hidden_reasoning_is_only_in_the_signature() -> None:
    events = stream([[ReasoningDelta("hm"), ContentDelta("x")]], hides_thoughts=True)
    block = assembled(events)["content"][0]
    assert block["thinking"] == "" and unsealed(SEALED, block["signature"]) == "hm"
    assert all(event.get("delta", {}).get("type") != "thinking_delta" for event in events)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected_message"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", "other", ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_stop_reason_uses_the_values_of_anthropic(
    reason: str, stop_reason: Any, expected_message: tuple[str, str | None]
) -> None:
    message = whole([ContentDelta("x")], reason, stop_reason, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == expected_message


def test_empty_response_has_no_blocks() -> None:
    assert whole([])["content"] == []


def test_failure_is_written_as_an_error_event() -> None:
    one = MessageWriter("msg_1", "m")
    (event,) = read(one.failure(ErrorAnswer(529, "busy", code="overloaded")))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}


def test_reasoning_tokens_are_in_the_usage_when_reported() -> None:
    counted = CompletionUsage(5, 3, 8, None, CompletionTokensDetails(2))
    message = MessageWriter("msg_1", "m").whole(Choice([ContentDelta("x")]), counted)
    assert json.loads(json_encode(message.usage))["output_tokens_details"] == {"thinking_tokens": 2}
    assert message.usage.input_tokens == 5


def test_every_delta_contains_the_current_usage() -> None:
    writer = MessageWriter("msg_1", "m")
    assert writer.counts
    written = writer.events(0, [ReasoningDelta("hm"), ContentDelta("so")], writer.count(USAGE), (), 0)
    usages = [one.get("usage") for one in read(written) if one["type"] == "content_block_delta"]
    wanted = {"input_tokens": 3, "output_tokens": 3, "total_tokens": 8}
    assert len(usages) == 3, "of the thought, its signature and the text"
    assert all(usage.items() >= wanted.items() for usage in usages)
