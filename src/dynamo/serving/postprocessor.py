"""Response bytes: the fixed text of a chunk is rendered once for a request, a token only fills the gap.

Pure. `ChatChunks` and `CompletionChunks` know the two shapes (serving-plane.md §1.5). A text chunk is

    head(index) + JSON-escaped text + tail

so that the k pieces which are ready at once are one `(tail + head).join(pieces)`: no dict, no encoder (architecture.md §5).
What a parser found in a text (`llm.reading`) is written event by event.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, Content, Event, Reasoning
from dynamo.protocols.engine import CompletionUsage, TopLogprob
from dynamo.protocols.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    FunctionCalled,
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
"""An engine's reason to OpenAI's. `cancelled` and `error:…` are no finish but a failure."""
TOOL_CALLS = "tool_calls"
"""The reason of a choice that stopped in order to have tools called."""
REASONING_FIELD = "reasoning_content"
"""Where thoughts are shown, unless `--reasoning-field-name` says otherwise."""


class TokenEntry:
    """One token with its logprob, for the answers that ask for it."""

    __slots__ = ("logprob", "raw", "text", "token_id", "top")

    def __init__(
        self, token_id: int, text: str, raw: bytes, logprob: float | None, top: Sequence[tuple[str, bytes, float]]
    ) -> None:
        self.token_id = token_id
        self.text = text
        self.raw = raw
        self.logprob = logprob
        """None for a prompt's first token, which nothing foretells."""
        self.top = top


class Chunks(Protocol):
    """What a streamed answer of one kind looks like. One is made for each response, and may remember what it said."""

    plain: bool
    """Whether a text chunk has the fixed text `head` and `tail`; otherwise every text comes through `events`."""

    def begin(self, prompt_tokens: int) -> bytes:
        """What opens the stream, before every choice; often nothing."""

    def head(self, index: int) -> bytes:
        """Up to the text of choice `index`."""

    def tail(self, usage: bytes = b"") -> bytes:
        """From the text to the end of the event; `usage` is the JSON of a running count, empty for none."""

    def first(self, index: int) -> bytes:
        """The event that opens choice `index`; empty where the format has none."""

    def text_with_logprobs(self, index: int, text: bytes, entries: Sequence[TokenEntry], offset: int) -> bytes:
        """A text event that carries logprobs; `offset` counts the characters of the choice before it."""

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """What was found in the text of choice `index`, at least one event or entry. Every `CallBegin` has an id.

        `usage` is the JSON of a running count, empty for none; `entries` are the logprobs of the tokens since the last
        call, `offset` the characters of the tokens before them.
        """

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """The event that ends choice `index`; `stop_reason` is the stop string or token id that ended it."""

    def usage(self, usage: CompletionUsage) -> bytes:
        """The event that counts tokens, after all choices, where it is wanted."""

    def end(self) -> bytes:
        """What closes a stream that is complete."""

    def failure(self, error: ErrorAnswer) -> bytes:
        """The error that breaks off a stream, and what closes it then."""


class OpenAiChunks:
    """What chat's and completions' streams have in common: how they begin and end, and what every chunk may carry."""

    plain = True
    no_usage = b""
    """What a chunk says of usage where it counts none."""

    def __init__(self, response_id: str, rest: bytes) -> None:
        self._open = b'data: {"id":"%b","choices":[' % response_id.encode()
        self._rest = rest
        self._nvext = self._close = b""
        self.carry()

    def carry(self, usage: bytes = b"", nvext: bytes = b"") -> None:
        """What every chunk carries until something else is said: the JSON of a running count, and that of `nvext`."""
        self._nvext = b',"nvext":' + nvext if nvext else b""
        self._close = self._closing(usage)

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
    """`chat.completion.chunk`."""

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
        """One chunk for each; the logprobs are in the first of them."""
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
            case Content():
                return b'"content":"%b"' % json_text(event.text)
            case Reasoning():
                return b'%b%b"' % (self._reasoning, json_text(event.text))
            case CallBegin():
                call = ResponseToolCall(event.call_id or "", FunctionCalled(event.name, ""), index=event.index)
                return b'"tool_calls":[%b]' % json_encode(call)
            case CallArguments():
                function = b'{"arguments":"%b"}' % json_text(event.text)
                return b'"tool_calls":[{"index":%d,"function":%b}]' % (event.index, function)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        delta = b'{"index":%d,"delta":{},"finish_reason":%b,"logprobs":null}' % (index, json_encode(reason))
        return self._open + delta + self._close


class CompletionChunks(OpenAiChunks):
    """`text_completion`, streamed."""

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
        """Completions show text alone, all of it in one chunk."""
        text = json_text("".join(event.text for event in events if isinstance(event, Content)))
        if entries:
            return self.text_with_logprobs(index, text, entries, offset)
        return self.head(index) + text + self.tail(usage)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        end = b'","finish_reason":%b,"logprobs":null}' % json_encode(reason)
        return self.head(index) + end + self._close


class FinishedChoice(Protocol):
    """What a unary answer needs of a choice that ended."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    entries: list[TokenEntry] | None
    prompt_logprobs: list[Any] | None

    def text(self) -> str:
        """All of its text for the user."""

    def events(self) -> list[Event]:
        """All that was found in its text, neighbours of one kind made one. Every `CallBegin` has an id."""


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
    """A whole `chat.completion`; an empty text is null, as upstream has it."""
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
    """An assistant's message, made of everything that was found in its text."""
    calls: dict[int, ResponseToolCall] = {}
    texts: dict[type[Event], str] = {}
    for event in events:
        match event:
            case CallBegin():
                calls[event.index] = ResponseToolCall(event.call_id or "", FunctionCalled(event.name, ""))
            case CallArguments():
                calls[event.index].function.arguments += event.text
            case _:
                texts[event.__class__] = texts.get(event.__class__, "") + event.text
    message = ResponseMessage(content=texts.get(Content), tool_calls=list(calls.values()) or UNSET)
    if Reasoning in texts:
        setattr(message, reasoning_field, texts[Reasoning])
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
    """A whole `text_completion`."""
    return json_encode(
        TextCompletion(
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
    )


def chat_logprobs(entries: Sequence[TokenEntry]) -> ChatLogprobs:
    """Chat's form: a list of tokens with their alternatives."""
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
    """Completions' form: parallel lists; `text_offset` counts characters from the start of the choice."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return TextLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            # Of several tokens with one text, such as parts of a character, the likeliest is shown.
            None if entry.logprob is None else {text: logprob for text, _, logprob in reversed(entry.top)}
            for entry in entries
        ],
        text_offset=offsets,
    )


def alternatives(top: Sequence[TopLogprob], count: int) -> list[TopLogprob]:
    """The `count` likeliest alternatives, likeliest first."""
    return sorted(top, key=lambda one: one.rank)[:count]
