"""Text surfaces: the chunks of a text worker, written as the answer of an endpoint that is not chat's own.

A worker that takes text speaks OpenAI's chat chunks; a client of `/v1/responses` or `/v1/messages` is told the same in
its own endpoint's words, through the `Chunks` and the body that every other answer of that endpoint is made with.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.parsers.base import CallArguments, CallBegin, Content, Event, Reasoning
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import Chunks, FinishedChoice, TokenEntry
from dynamo.text.answer_parsing import joined, new_call_id

Body = Callable[[Sequence[FinishedChoice], CompletionUsage], bytes]


@dataclass(slots=True)
class Told:
    """A choice, as far as the worker has told it."""

    index: int
    found: list[Event] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    entries: list[TokenEntry] | None = None
    prompt_logprobs: list[Any] | None = None

    def text(self) -> str:
        """See `FinishedChoice.text`."""
        return "".join(event.text for event in self.found if isinstance(event, Content))

    def events(self) -> list[Event]:
        """See `FinishedChoice.events`."""
        return joined(self.found)

    def hear(self, delta: Mapping[str, Any]) -> list[Event]:
        """What a chunk adds."""
        events: list[Event] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            events.append(Reasoning(thought))
        if delta.get("content"):
            events.append(Content(delta["content"]))
        for part in delta.get("tool_calls") or ():
            events += self._hear_call(part)
        return events

    def _hear_call(self, part: Mapping[str, Any]) -> list[Event]:
        """A call's first part names it; the next ones, under the same index, are more of its arguments."""
        index = part.get("index", len(self.calls))
        function = part.get("function") or {}
        events: list[Event] = []
        if index not in self.calls:
            self.calls.add(index)
            events.append(CallBegin(index, function.get("name") or "", part.get("id") or new_call_id()))
        if function.get("arguments"):
            events.append(CallArguments(index, function["arguments"]))
        return events


class TextWriter:
    """One answer, made of checked chat chunks."""

    def __init__(self, chunks: Chunks, body: Body) -> None:
        self._chunks = chunks
        self._body = body
        self._choices: dict[int, Told] = {}
        self._usage: CompletionUsage | None = None

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """What a stream says of a chunk."""
        said: list[bytes] = []
        for choice, events, is_new in self._hear(chunk):
            if is_new:
                if len(self._choices) == 1:
                    said.append(self._chunks.begin(self._counted().prompt_tokens))
                said.append(self._chunks.first(choice.index))
            if events:
                said.append(self._chunks.events(choice.index, events, b"", [], 0))
        return b"".join(said)

    def end(self) -> bytes:
        """What a stream says at its end."""
        ends = [
            self._chunks.finish(one.index, one.finish_reason or "stop", one.stop_reason)
            for one in self._choices.values()
        ]
        return b"".join([*ends, self._chunks.usage(self._counted()), self._chunks.end()])

    def failure(self, error: ErrorAnswer) -> bytes:
        """What a stream says when it breaks off."""
        return self._chunks.failure(error)

    def whole(self, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        """One answer of all chunks."""
        for chunk in chunks:
            for choice, events, _ in self._hear(chunk):
                choice.found += events
        return self._body([self._choices[index] for index in sorted(self._choices)], self._counted())

    def _hear(self, chunk: Mapping[str, Any]) -> list[tuple[Told, list[Event], bool]]:
        """Each choice of a chunk, what it adds to it, and whether it is the first that is heard of it."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            with contextlib.suppress(msgspec.ValidationError):  # A count that cannot be read is none.
                self._usage = msgspec.convert(usage, CompletionUsage, strict=False)
        heard: list[tuple[Told, list[Event], bool]] = []
        for part in chunk["choices"]:
            index = part.get("index") or 0
            is_new = index not in self._choices
            choice = self._choices.setdefault(index, Told(index))
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            heard.append((choice, choice.hear(part["delta"]), is_new))
        return heard

    def _counted(self) -> CompletionUsage:
        """The worker's count; a worker that counts nothing leaves it at nothing."""
        return self._usage or CompletionUsage(0, 0, 0)
