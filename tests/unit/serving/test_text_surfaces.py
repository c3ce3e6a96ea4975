"""A text worker's chat chunks in the words of another endpoint."""

from collections.abc import Sequence
from typing import Any

from dynamo.serving.text_surfaces import TextWriter

from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import FinishedChoice


class Words:
    """An endpoint's events, as words."""

    plain = False

    def begin(self, prompt_tokens: int) -> bytes:
        return b"begin%d " % prompt_tokens

    def head(self, index: int) -> bytes:
        raise AssertionError

    def tail(self, usage: bytes = b"") -> bytes:
        raise AssertionError

    def text_with_logprobs(self, *given: Any) -> bytes:
        raise AssertionError

    def first(self, index: int) -> bytes:
        return b"first%d " % index

    def events(self, index: int, events: Sequence[Event], *given: Any) -> bytes:
        return "".join(f"{type(event).__name__}{index} " for event in events).encode()

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        return f"{reason}{index} ".encode()

    def usage(self, usage: CompletionUsage) -> bytes:
        return b"usage%d " % usage.total_tokens

    def end(self) -> bytes:
        return b"end"

    def failure(self, error: ErrorAnswer) -> bytes:
        return b"failure"


def body(choices: Sequence[FinishedChoice], usage: CompletionUsage) -> bytes:
    return repr([(one.index, one.text(), one.events(), one.finish_reason) for one in choices]).encode()


def make() -> TextWriter:
    return TextWriter(Words(), body)


def chunk(delta: dict[str, Any], index: int = 0, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}], **more}


CALL = [
    {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
    {"index": 0, "function": {"arguments": "{}"}},
]
CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "So"}),
    chunk({"tool_calls": CALL[:1]}),
    chunk({"tool_calls": CALL[1:]}),
    chunk({}, reason="tool_calls", usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
]


def test_chunks_become_the_endpoints_events() -> None:
    writer = make()
    said = b"".join([writer.chunk(one) for one in CHUNKS] + [writer.end()]).decode().split()
    assert said == [
        "begin0", "first0", "ReasoningDelta0", "ContentDelta0", "CallBegin0", "CallArguments0", "tool_calls0", "usage7", "end",
    ]  # fmt: skip


def test_choices_begin_and_end_on_their_own() -> None:
    writer = make()
    said = writer.chunk(chunk({"content": "a"})) + writer.chunk(chunk({"content": "b"}, 1, "length")) + writer.end()
    assert said.decode().split() == [
        "begin0", "first0", "ContentDelta0", "first1", "ContentDelta1", "stop0", "length1", "usage0", "end",
    ]  # fmt: skip


def test_all_chunks_make_one_answer() -> None:
    events = [ReasoningDelta("hm"), ContentDelta("So"), CallBegin(0, "f", "c"), CallArguments(0, "{}")]
    assert make().whole(CHUNKS) == repr([(0, "So", events, "tool_calls")]).encode()


def test_a_call_without_an_id_is_given_one() -> None:
    told = make().whole([chunk({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})]).decode()
    assert "call_id='call-" in told


def test_a_failure_is_the_endpoints_own() -> None:
    assert make().failure(ErrorAnswer(500, "no")) == b"failure"
