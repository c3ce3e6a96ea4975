"""Chat stream chunks with extra events for complete tool calls and complete reasoning.

Enabled by `--enable-streaming-tool-dispatch` and `--enable-streaming-reasoning-dispatch`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct, field

from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, Event, ReasoningDelta
from dynamo.protocols.openai_answers import ResponseFunctionCall, ResponseToolCall
from dynamo.serving.postprocessor import REASONING_FIELD, ChatChunks, TokenEntry

REASONING_FIELDS = (REASONING_FIELD, "reasoning")


class _Open(Struct):
    """Incomplete tool call and reasoning of one choice."""

    call: ResponseToolCall | None = None
    arguments: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


class AnnouncingChunks(ChatChunks):
    """`chat.completion.chunk` events, with `tool_call_dispatch` after each call and one `reasoning_dispatch`."""

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        reasoning_field: str = REASONING_FIELD,
        service_tier: str | None = None,
        *,
        calls: bool,
        thoughts: bool,
    ) -> None:
        super().__init__(response_id, model, created, reasoning_field, service_tier)
        self._field = reasoning_field
        self._calls = calls
        self._thoughts = thoughts
        self._choices: dict[int, _Open] = {}

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return the chunks; the dispatch events of completed items come before the next item begins."""
        written: list[bytes] = []
        for event in events:
            written.append(self._announce(index, event))
            written.append(super().events(index, [event], usage, entries, offset))
            entries = ()
        return b"".join(written) if events else super().events(index, events, usage, entries, offset)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        return self._announce(index, None) + super().finish(index, reason, stop_reason)

    def _announce(self, index: int, event: Event | None) -> bytes:
        """Return the dispatch event of the item that `event` completes; `None` is the end of the choice."""
        pending = self._choices.setdefault(index, _Open())
        written = b""
        if self._calls and pending.call is not None and not isinstance(event, CallArguments):
            pending.call.function.arguments = "".join(pending.arguments)
            written += _event("tool_call_dispatch", {"choice_index": index, "tool_call": pending.call})
            pending.call = None
        if self._thoughts and pending.thoughts and not isinstance(event, ReasoningDelta):
            written += _event("reasoning_dispatch", {"index": index, self._field: "".join(pending.thoughts)})
            pending.thoughts.clear()
        match event:
            case CallBegin():
                pending.call = ResponseToolCall(
                    event.call_id or "", ResponseFunctionCall(event.name, ""), index=event.index
                )
                pending.arguments.clear()
            case CallArguments():
                pending.arguments.append(event.text)
            case ReasoningDelta():
                pending.thoughts.append(event.text)
        return written


def _event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_encode(data))


class AnswerOptions(Struct, frozen=True, kw_only=True):
    """Format of a frontend's chat responses."""

    reasoning_field: str = REASONING_FIELD
    announces_calls: bool = False
    announces_thoughts: bool = False

    @property
    def chunks(self) -> Callable[..., ChatChunks]:
        """Factory of the event writer of one stream, from response id, model and creation time."""
        if not self.announces_calls and not self.announces_thoughts:
            return partial(ChatChunks, reasoning_field=self.reasoning_field)
        return partial(
            AnnouncingChunks,
            reasoning_field=self.reasoning_field,
            calls=self.announces_calls,
            thoughts=self.announces_thoughts,
        )
