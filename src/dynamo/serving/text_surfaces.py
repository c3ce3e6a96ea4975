"""Chunks of a text worker, converted to the response of an endpoint other than chat.

A text worker sends OpenAI's chat chunks; a client of `/v1/responses` or `/v1/messages` receives the same content in the
format of its endpoint, through the `Chunks` and the body writer of all other responses of that endpoint.
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
class ChoiceState:
    """Output of one choice received so far."""

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

    def add_delta(self, delta: Mapping[str, Any]) -> list[Event]:
        """Add a chunk's delta and return its events."""
        events: list[Event] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            events.append(Reasoning(thought))
        if delta.get("content"):
            events.append(Content(delta["content"]))
        for part in delta.get("tool_calls") or ():
            events += self._add_call(part)
        return events

    def _add_call(self, part: Mapping[str, Any]) -> list[Event]:
        """Add a part of a tool call: the first part has its name, later parts with the same index more arguments."""
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
    """One response, made of checked chat chunks."""

    def __init__(self, chunks: Chunks, body: Body) -> None:
        self._chunks = chunks
        self._body = body
        self._choices: dict[int, ChoiceState] = {}
        self._usage: CompletionUsage | None = None

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the stream events of a chunk."""
        written: list[bytes] = []
        for choice, events, is_new in self._add_chunk(chunk):
            if is_new:
                if len(self._choices) == 1:
                    written.append(self._chunks.begin(self._counted().prompt_tokens))
                written.append(self._chunks.first(choice.index))
            if events:
                written.append(self._chunks.events(choice.index, events, b"", [], 0))
        return b"".join(written)

    def end(self) -> bytes:
        """Return the stream events of the end."""
        ends = [
            self._chunks.finish(one.index, one.finish_reason or "stop", one.stop_reason)
            for one in self._choices.values()
        ]
        return b"".join([*ends, self._chunks.usage(self._counted()), self._chunks.end()])

    def failure(self, error: ErrorAnswer) -> bytes:
        """Return the stream events of a failure."""
        return self._chunks.failure(error)

    def whole(self, chunks: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the whole response of all chunks."""
        for chunk in chunks:
            for choice, events, _ in self._add_chunk(chunk):
                choice.found += events
        return self._body([self._choices[index] for index in sorted(self._choices)], self._counted())

    def _add_chunk(self, chunk: Mapping[str, Any]) -> list[tuple[ChoiceState, list[Event], bool]]:
        """Return each choice of a chunk, its new events, and whether this is its first output."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            with contextlib.suppress(msgspec.ValidationError):  # Ignore an invalid usage.
                self._usage = msgspec.convert(usage, CompletionUsage, strict=False)
        changes: list[tuple[ChoiceState, list[Event], bool]] = []
        for part in chunk["choices"]:
            index = part.get("index") or 0
            is_new = index not in self._choices
            choice = self._choices.setdefault(index, ChoiceState(index))
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            changes.append((choice, choice.add_delta(part["delta"]), is_new))
        return changes

    def _counted(self) -> CompletionUsage:
        """Return the worker's usage; zero if it reports none."""
        return self._usage or CompletionUsage(0, 0, 0)
