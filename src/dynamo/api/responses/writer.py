"""ResponseWriter: stream events and whole response of OpenAI's Responses API. Pure.

It implements `Chunks` (serving/postprocessor.py).
"""

from collections.abc import Callable, Sequence

from dynamo.api.content_blocks import BlockKind, BlockWriter, OutputBlock
from dynamo.api.responses.echo import RequestEcho
from dynamo.api.responses.ids import item_id
from dynamo.core.codec import json_encode
from dynamo.parsers.base import ContentDelta, Event
from dynamo.protocols.engine import CompletionUsage
from dynamo.protocols.response_items import (
    FunctionCallItem,
    ItemStatus,
    Logprob,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseTopLogprob,
)
from dynamo.protocols.responses import (
    CachedTokens,
    IncompleteDetails,
    ReasoningTokens,
    Response,
    ResponseFailure,
    ResponseUsage,
)
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import DONE, FinishedChoice, TokenEntry, Written, parts_of
from dynamo.text.detokenizer import json_text

Keep = Callable[[Response], None]
"""Called with each complete response."""

PREFIXES = {BlockKind.TEXT: "msg", BlockKind.THOUGHT: "rs", BlockKind.CALL: "fc"}
NOUNS = {
    BlockKind.TEXT: b"response.output_text",
    BlockKind.THOUGHT: b"response.reasoning_text",
    BlockKind.CALL: b"response.function_call_arguments",
}
FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded", 529: "rate_limit_exceeded"}
"""OpenAI's error codes of a failed response, by status; any other status is a `server_error`."""


class ResponseWriter(BlockWriter):
    """Writer of one response."""

    def __init__(
        self,
        response: Response,
        *,
        now: Callable[[], float],
        keep: Keep | None = None,
        logprobs: bool = False,
        echo: RequestEcho | None = None,
    ) -> None:
        """`echo`: the encoded fields of a long request."""
        super().__init__()
        self._echo = echo
        self.response = response
        self._now = now
        self._keep = keep
        self._wants_logprobs = logprobs
        self._sequence = 0
        self._place = b""
        """Position of the open item, as in its events."""
        self._logprobs: list[Logprob] = []
        """Logprobs of the current message."""
        self._fresh: list[Logprob] = []
        """Logprobs that no event has carried yet."""
        self._reason = "stop"

    # Parts of a stream.

    def begin(self, prompt_tokens: int) -> Written:
        """Return `response.created` and `response.in_progress`."""
        created, begun = self._lifecycle(b"response.created"), self._lifecycle(b"response.in_progress")
        if isinstance(created, bytes) and isinstance(begun, bytes):
            return created + begun
        return [*parts_of(created), *parts_of(begun)]

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return the item events of parsed events. Logprobs are reported for text up to the first other item."""
        if entries and self._wants_logprobs and self._row.is_only_text:
            self._fresh += [logprob_of(entry) for entry in entries]
        return super().events(index, events, usage, entries, offset)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """Close the last item, as complete or cut off; an empty answer becomes an empty message."""
        self._reason = reason
        is_cut = reason in ("length", "content_filter")
        return self._write(self._row.finish(is_cut=is_cut, needs_block=True))

    def usage(self, usage: CompletionUsage) -> Written:
        """Return the final event with the complete response."""
        self._settle(usage)
        return self._lifecycle(b"response." + self.response.status.encode())

    def end(self) -> bytes:
        """Return `[DONE]`, as upstream; OpenAI's own streams end without it, and clients accept both."""
        return DONE

    def failure(self, error: ErrorAnswer) -> Written:
        """Close the open item as cut off, and return the failure. If the stream has no events yet, begin it first."""
        opening = [] if self._sequence else parts_of(self.begin(0))
        closing = self._write(self._row.finish(is_cut=True))
        self.response.status = "failed"
        self.response.error = ResponseFailure(FAILURES.get(error.status, "server_error"), error.message)
        found = [*opening, closing, *parts_of(self._lifecycle(b"response.failed")), DONE]
        return b"".join(found) if self._echo is None else found

    # The whole response.

    def whole(self, choice: FinishedChoice, usage: CompletionUsage) -> Response:
        """Return the whole response."""
        events = choice.events()
        self.events(0, events, b"", entries_of_text(events, choice.entries or ()), 0)
        self.finish(0, choice.finish_reason or "stop", choice.stop_reason)
        self._settle(usage)
        return self.response

    # Implementation.

    def _settle(self, usage: CompletionUsage) -> None:
        response = self.response
        response.usage = usage_of(usage)
        if self._reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        elif self._reason == "content_filter":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("content_filter")
        else:
            response.status, response.completed_at = "completed", int(self._now())
        if self._keep is not None:
            self._keep(response)

    def _opened(self, block: OutputBlock) -> bytes:
        item = self._item(block, "in_progress")
        self._place = b'"item_id":"%b","output_index":%d' % ((item.id or "").encode(), block.index)
        added = b'"output_index":%d,"item":%b' % (block.index, json_encode(item))
        opening = self._event(b"response.output_item.added", added)
        if block.kind is BlockKind.CALL:
            return opening
        self._place += b',"content_index":0'
        part = b'%b,"part":%b' % (self._place, json_encode(self._part(block, "")))
        return opening + self._event(b"response.content_part.added", part)

    def _grown(self, block: OutputBlock, text: str) -> bytes:
        delta = b'%b,"delta":"%b"' % (self._place, json_text(text))
        if block.kind is BlockKind.TEXT:
            fresh, self._fresh = self._fresh, []
            self._logprobs += fresh
            delta += b',"logprobs":%b' % json_encode(fresh) if fresh else b',"logprobs":[]'
        return self._event(NOUNS[block.kind] + b".delta", delta)

    def _closed(self, block: OutputBlock, *, is_cut: bool) -> bytes:
        if self._row.is_only_text:
            self._logprobs += self._fresh  # Logprobs of withheld text that produced no event.
        self._fresh = []
        text, place = block.text(), self._place
        item = self._item(block, "incomplete" if is_cut else "completed", text)
        self.response.output.append(item)
        if block.kind is BlockKind.CALL:
            done = b'%b,"name":%b,"arguments":"%b"' % (place, json_encode(block.name), json_text(text))
        else:
            done = b'%b,"text":"%b"' % (place, json_text(text))
            if block.kind is BlockKind.TEXT:
                done += b',"logprobs":%b' % json_encode(self._logprobs)
        ending = self._event(NOUNS[block.kind] + b".done", done)
        if block.kind is not BlockKind.CALL:
            part = b'%b,"part":%b' % (place, json_encode(self._part(block, text)))
            ending += self._event(b"response.content_part.done", part)
        self._logprobs = []
        whole = b'"output_index":%d,"item":%b' % (block.index, json_encode(item))
        return ending + self._event(b"response.output_item.done", whole)

    def _item(self, block: OutputBlock, status: ItemStatus, text: str | None = None) -> OutputItem:
        """Return the item of a block; its text is None while it is open."""
        name = item_id(PREFIXES[block.kind], self.response.id, block.index)
        match block.kind:
            case BlockKind.CALL:
                return FunctionCallItem(text or "", block.call_id, block.name, name, status)
            case BlockKind.THOUGHT:
                return ReasoningItem([], name, [] if text is None else [ReasoningText(text)], None, status)
            case BlockKind.TEXT:
                content = [] if text is None else [OutputText(text, logprobs=self._logprobs)]
                return MessageItem("assistant", [*content], name, status)

    def _part(self, block: OutputBlock, text: str) -> OutputText | ReasoningText:
        if block.kind is BlockKind.THOUGHT:
            return ReasoningText(text)
        return OutputText(text, logprobs=self._logprobs)

    def _lifecycle(self, name: bytes) -> Written:
        if self._echo is None:
            return self._event(name, b'"response":' + json_encode(self.response))
        number, (head, *rest, tail) = self._sequence, self._echo.within(self.response)
        self._sequence += 1
        opening = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b' % (name, name, number, head)
        return [opening, *rest, tail + b"}\n\n"]

    def _event(self, name: bytes, fields: bytes) -> bytes:
        number = self._sequence
        self._sequence += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, fields)


def usage_of(usage: CompletionUsage) -> ResponseUsage:
    """Return the usage in the Responses API's fields."""
    thoughts = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(usage.cached_tokens or 0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(0 if thoughts is None else thoughts.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def logprob_of(entry: TokenEntry) -> Logprob:
    """Return a token's logprob in the form of a message's text."""
    tops = [ResponseTopLogprob(text, logprob, list(raw)) for text, raw, logprob in entry.top]
    return Logprob(entry.text, entry.logprob or 0.0, list(entry.raw), tops)


def entries_of_text(events: Sequence[Event], entries: Sequence[TokenEntry]) -> Sequence[TokenEntry]:
    """Return the tokens of the text before any other event: all tokens if there is only text."""
    if all(isinstance(event, ContentDelta) for event in events):
        return entries
    left = len(events[0].text) if isinstance(events[0], ContentDelta) else 0
    count = 0
    while left > 0 and count < len(entries):
        left -= len(entries[count].text)
        count += 1
    return entries[:count]
