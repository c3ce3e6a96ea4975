"""Response bytes: stream chunks and whole bodies; the fixed text of a chunk is rendered once per request.

Pure. `ChatChunks` and `CompletionChunks` implement the two formats. A text chunk is

    head(index) + JSON-escaped text + tail

so that the k pieces which are ready at once are one `(tail + head).join(pieces)`: no dict, no encoder. Events from a
parser (`text.answer_parsing`) are written one by one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionUsage, TopLogprob
from dynamo.protocols.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ResponseFunctionCall,
    ResponseMessage,
    ResponseToolCall,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopTokenLogprob,
)
from dynamo.serving.errors import ErrorAnswer
from dynamo.text.detokenizer import json_text

DONE = b"data: [DONE]\n\n"

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "content_filter": "content_filter"}
"""OpenAI's finish reason by the engine's. `cancelled` and `error:…` are failures and have none."""
TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that ended with tool calls."""
REASONING_FIELD = "reasoning_content"
"""Field of the reasoning text, unless `--reasoning-field-name` sets another one."""


class TokenEntry:
    """One token with its logprob, for responses with logprobs."""

    __slots__ = ("logprob", "raw", "text", "token_id", "top")

    def __init__(
        self, token_id: int, text: str, raw: bytes, logprob: float | None, top: Sequence[tuple[str, bytes, float]]
    ) -> None:
        self.token_id = token_id
        self.text = text
        self.raw = raw
        self.logprob = logprob
        """Log-probability; None for a prompt's first token, which has no context."""
        self.top = top


Written = bytes | list[bytes]
"""Events of a stream; those that repeat a long request are a list of parts, which are not joined on the event loop."""


def parts_of(written: Written) -> list[bytes]:
    """Return events as a list of parts."""
    return [written] if isinstance(written, bytes) else written


class Chunks(Protocol):
    """Writer of one streamed response; it may keep state between calls."""

    plain: bool
    """Whether a text chunk has the fixed text `head` and `tail`; otherwise all text is passed to `events`."""
    counts: bool
    """Whether `events` writes the running usage of every stream, as `count` returns it."""

    def count(self, usage: CompletionUsage) -> bytes:
        """Return the running usage as JSON of the format."""

    def begin(self, prompt_tokens: int) -> Written:
        """Return the events before all choices; often empty."""

    def head(self, index: int) -> bytes:
        """Return the part of a text chunk before the text, for choice `index`."""

    def tail(self, usage: bytes = b"") -> bytes:
        """Return the part of a text chunk after the text; `usage` is the JSON of the running usage, empty for none."""

    def first(self, index: int) -> bytes:
        """Return the first event of choice `index`; empty if the format has none."""

    def text_with_logprobs(self, index: int, text: bytes, entries: Sequence[TokenEntry], offset: int) -> bytes:
        """Return a text event with logprobs; `offset` is the number of characters of the choice before it."""

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return the chunks of parsed events of choice `index`, at least one event or entry. Every `CallBegin` has an id.

        `usage` is the JSON of the running usage, empty for none; `entries` are the logprobs of the tokens since the last
        call, `offset` the number of characters of the tokens before them.
        """

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """Return the last event of choice `index`; `stop_reason` is the stop string or token id that ended it."""

    def usage(self, usage: CompletionUsage) -> Written:
        """Return the usage event, which follows all choices if requested."""

    def end(self) -> bytes:
        """Return the end of a complete stream."""

    def failure(self, error: ErrorAnswer) -> Written:
        """Return the error event and the end of a failed stream."""


class OpenAiChunks:
    """Common part of chat and completion streams: begin, end, and fields present in every chunk."""

    plain, counts = True, False
    no_usage = b""
    """Usage field of a chunk without usage."""

    def __init__(self, response_id: str, rest: bytes) -> None:
        self._open = b'data: {"id":"%b","choices":[' % response_id.encode()
        self._rest = rest
        self._nvext = self._close = b""
        self.carry()

    def carry(self, usage: bytes = b"", nvext: bytes = b"") -> None:
        """Set the fields of all following chunks: running usage and `nvext`, both as JSON."""
        self._nvext = b',"nvext":' + nvext if nvext else b""
        self._close = self._closing(usage)

    def count(self, usage: CompletionUsage) -> bytes:
        return json_encode(usage)

    def _closing(self, usage: bytes) -> bytes:
        counted = b',"usage":' + usage if usage else self.no_usage
        return b"],%b%b%b}\n\n" % (self._rest, counted, self._nvext)

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def usage(self, usage: CompletionUsage) -> bytes:
        return b'%b],%b,"usage":%b}\n\n' % (self._open, self._rest, json_encode(usage))

    def end(self) -> bytes:
        return DONE

    def failure(self, error: ErrorAnswer) -> bytes:
        return error.event() + DONE


class ChatChunks(OpenAiChunks):
    """`chat.completion.chunk` events."""

    def __init__(
        self,
        response_id: str,
        model: str,
        created: int,
        reasoning_field: str = REASONING_FIELD,
        service_tier: str | None = None,
    ) -> None:
        rest = b'"created":%d,"model":%b,"object":"chat.completion.chunk"' % (created, json_encode(model))
        tier = b"" if service_tier is None else b',"service_tier":' + json_encode(service_tier)
        super().__init__(response_id, rest + tier)
        self._reasoning = b'"%b":"' % reasoning_field.encode()

    def head(self, index: int) -> bytes:
        return b'%b{"index":%d,"delta":{"content":"' % (self._open, index)

    def tail(self, usage: bytes = b"") -> bytes:
        return b'"},"finish_reason":null,"logprobs":null}' + (self._closing(usage) if usage else self._close)

    def first(self, index: int) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"finish_reason":null,"logprobs":null}' % index
        return self._open + delta + self._close

    def text_with_logprobs(self, index: int, text: bytes, entries: Sequence[TokenEntry], offset: int) -> bytes:
        logprobs = json_encode(chat_logprobs(entries))
        end = b'"},"finish_reason":null,"logprobs":%b}' % logprobs
        return self.head(index) + text + end + self._close

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return one chunk per event; the logprobs are in the first."""
        close = self._closing(usage) if usage else self._close
        logprobs = json_encode(chat_logprobs(entries)) if entries else b"null"
        chunks: list[bytes] = []
        for delta in [self._delta(event) for event in events] or [b""]:
            middle = b'{"index":%d,"delta":{%b},"finish_reason":null,"logprobs":%b}' % (index, delta, logprobs)
            chunks.append(self._open + middle + close)
            logprobs = b"null"
        return b"".join(chunks)

    def _delta(self, event: Event) -> bytes:
        match event:
            case ContentDelta():
                return b'"content":"%b"' % json_text(event.text)
            case ReasoningDelta():
                return b'%b%b"' % (self._reasoning, json_text(event.text))
            case CallBegin():
                call = ResponseToolCall(event.call_id or "", ResponseFunctionCall(event.name, ""), index=event.index)
                return b'"tool_calls":[%b]' % json_encode(call)
            case CallArguments():
                function = b'{"arguments":"%b"}' % json_text(event.text)
                return b'"tool_calls":[{"index":%d,"function":%b}]' % (event.index, function)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        delta = b'{"index":%d,"delta":{},"finish_reason":%b,"logprobs":null}' % (index, json_encode(reason))
        return self._open + delta + self._close


class CompletionChunks(OpenAiChunks):
    """Streamed `text_completion` events."""

    no_usage = b',"usage":null'

    def __init__(self, response_id: str, model: str, created: int) -> None:
        rest = b'"created":%d,"model":%b,"system_fingerprint":null,"object":"text_completion"'
        super().__init__(response_id, rest % (created, json_encode(model)))

    def head(self, index: int) -> bytes:
        return b'%b{"index":%d,"text":"' % (self._open, index)

    def tail(self, usage: bytes = b"") -> bytes:
        return b'","finish_reason":null,"logprobs":null}' + (self._closing(usage) if usage else self._close)

    def first(self, index: int) -> bytes:
        return b""

    def text_with_logprobs(self, index: int, text: bytes, entries: Sequence[TokenEntry], offset: int) -> bytes:
        logprobs = json_encode(text_logprobs(entries, offset))
        return self.head(index) + text + b'","finish_reason":null,"logprobs":%b}' % logprobs + self._close

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return one chunk with all text: completions have no other events."""
        text = json_text("".join(event.text for event in events if isinstance(event, ContentDelta)))
        if entries:
            return self.text_with_logprobs(index, text, entries, offset)
        return self.head(index) + text + self.tail(usage)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        end = b'","finish_reason":%b,"logprobs":null}' % json_encode(reason)
        return self.head(index) + end + self._close


class FinishedChoice(Protocol):
    """Finished choice, as needed for a unary response."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    entries: list[TokenEntry] | None
    prompt_logprobs: list[Any] | None

    def text(self) -> str:
        """Return all of its text for the user."""

    def events(self) -> list[Event]:
        """Return all parsed events, adjacent ones of a kind merged. Every `CallBegin` has an id."""


def chat_body(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[FinishedChoice],
    usage: CompletionUsage,
    *,
    reasoning_field: str = REASONING_FIELD,
    service_tier: str | None = None,
    nvext: dict[str, Any] | None = None,
) -> bytes:
    """Return a whole `chat.completion`; an empty text is null, as upstream."""
    return json_encode(
        ChatCompletion(
            id=response_id,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=chat_message(choice.events(), reasoning_field),
                    finish_reason=choice.finish_reason,
                    logprobs=chat_logprobs(choice.entries) if choice.entries else None,
                )
                for choice in choices
            ],
            created=created,
            model=model,
            service_tier=UNSET if service_tier is None else service_tier,
            usage=usage,
            prompt_logprobs=_shown(choices[0].prompt_logprobs) if choices else UNSET,
            nvext=nvext or UNSET,
        )
    )


def _shown(prompt_logprobs: list[Any] | None) -> list[Any] | UnsetType:
    return UNSET if prompt_logprobs is None else prompt_logprobs


def chat_message(events: Sequence[Event], reasoning_field: str = REASONING_FIELD) -> ResponseMessage:
    """Return the assistant message made of all parsed events."""
    calls: dict[int, ResponseToolCall] = {}
    texts: dict[type[Event], str] = {}
    for event in events:
        match event:
            case CallBegin():
                calls[event.index] = ResponseToolCall(event.call_id or "", ResponseFunctionCall(event.name, ""))
            case CallArguments():
                calls[event.index].function.arguments += event.text
            case _:
                texts[event.__class__] = texts.get(event.__class__, "") + event.text
    message = ResponseMessage(content=texts.get(ContentDelta), tool_calls=list(calls.values()) or UNSET)
    if ReasoningDelta in texts:
        setattr(message, reasoning_field, texts[ReasoningDelta])
    return message


def completion_body(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[FinishedChoice],
    usage: CompletionUsage,
    *,
    nvext: dict[str, Any] | None = None,
) -> bytes:
    """Return the body of a whole `text_completion`."""
    return json_encode(text_completion(response_id, model, created, choices, usage, nvext=nvext))


def text_completion(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[FinishedChoice],
    usage: CompletionUsage,
    *,
    nvext: dict[str, Any] | None = None,
) -> TextCompletion:
    """Return a whole `text_completion`."""
    return TextCompletion(
        id=response_id,
        choices=[
            TextChoice(
                text=choice.text(),
                index=choice.index,
                finish_reason=choice.finish_reason,
                logprobs=text_logprobs(choice.entries, 0) if choice.entries else None,
                prompt_logprobs=_shown(choice.prompt_logprobs),
            )
            for choice in choices
        ],
        created=created,
        model=model,
        usage=usage,
        nvext=nvext or UNSET,
    )


def chat_logprobs(entries: Sequence[TokenEntry]) -> ChatLogprobs:
    """Return logprobs in chat's form: a list of tokens with their alternatives."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=entry.text,
                logprob=entry.logprob or 0.0,
                token_id=entry.token_id,
                bytes=list(entry.raw),
                top_logprobs=[TopTokenLogprob(token=t, logprob=lp, bytes=list(raw)) for t, raw, lp in entry.top],
            )
            for entry in entries
        ]
    )


def text_logprobs(entries: Sequence[TokenEntry], offset: int) -> TextLogprobs:
    """Return logprobs in completions' form: parallel lists; `text_offset` counts characters from the choice's start."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return TextLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            # Of several tokens with the same text, such as parts of a character, show the most likely one.
            None if entry.logprob is None else {text: logprob for text, _, logprob in reversed(entry.top)}
            for entry in entries
        ],
        text_offset=offsets,
    )


def alternatives(top: Sequence[TopLogprob], count: int) -> list[TopLogprob]:
    """Return the `count` most likely alternatives, most likely first."""
    return sorted(top, key=lambda one: one.rank)[:count]
