"""Text workers: relay of client requests to workers that respond with OpenAI chunks (`ModelInput.Text`).

Such a worker always streams chunks, `{"choices": [{"index", "delta" | "text", "finish_reason"}], …}`. They are passed on
to a streaming client one by one, and folded into a whole response for others.
"""

import abc
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct, field

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.codec import decode, encode_client_json, json_decode, json_encode
from dynamo.core.errors import DynamoException, NotFound, StreamIncomplete, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionUsage
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.runtime.request_plane.base import Call, Item
from dynamo.serving.answers import BaseAnswer, BodyLater, Closed
from dynamo.serving.attempts import Attempts, is_retryable, more_informative
from dynamo.serving.bodies import decoded
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.model_lookup import ModelAccess
from dynamo.serving.models import Models
from dynamo.serving.postprocessor import DONE, Chunks, FinishedChoice, TokenEntry, parts_of
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_stream import IncomingRequest, ResponseStream
from dynamo.serving.served_model import ServedModel
from dynamo.text.answer_parsing import joined, new_call_id


def text_model(models: Models, name: str | None, model_type: str, access: ModelAccess | None) -> ServedModel:
    """Return the set that serves text requests of that type. Raise the errors of `Models.find`."""
    model = models.find(name or "", model_type, access)
    if not model.takes_text:
        raise NotFound(
            f"Model not found: {name!r} takes tokens, and {model_type.lower()} is served by text models only"
        )
    return model


class ChatShape:
    """`chat.completion.chunk`, and the `chat.completion` folded from chunks."""

    @staticmethod
    def check(chunk: Any, model: str) -> dict[str, Any]:
        """Return the complete chunk. Raise `Unknown` for an invalid one."""
        return _checked(chunk, "delta", dict, "chat.completion.chunk", model)

    @staticmethod
    def fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one response of all chunks; there is at least one."""
        choices: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for part in chunk["choices"]:
                _add_chat(choices, part)
        for choice in choices.values():
            for call in choice["message"].get("tool_calls", ()):
                del call["index"]
        whole = {
            "id": chunks[0]["id"],
            "choices": [choices[index] for index in sorted(choices)],
            "created": chunks[0]["created"],
            "model": chunks[0]["model"],
            "object": "chat.completion",
        }
        usage = _last(chunks, "usage")
        return whole if usage is None else {**whole, "usage": usage}


class CompletionShape:
    """`text_completion` chunks, and the whole `text_completion`."""

    @staticmethod
    def check(chunk: Any, model: str) -> dict[str, Any]:
        """Return the complete chunk. Raise `Unknown` for an invalid one."""
        return _checked(chunk, "text", str, "text_completion", model)

    @staticmethod
    def fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one response of all chunks; there is at least one."""
        choices: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for part in chunk["choices"]:
                index = part.get("index") or 0
                one = choices.setdefault(index, {"text": "", "index": index, "finish_reason": None, "logprobs": None})
                one["text"] += part["text"]
                one["logprobs"] = _joined(one["logprobs"], part.get("logprobs"))
                one["finish_reason"] = part.get("finish_reason") or one["finish_reason"]
        return {
            "id": chunks[0]["id"],
            "choices": [choices[index] for index in sorted(choices)],
            "created": chunks[0]["created"],
            "model": chunks[0]["model"],
            "system_fingerprint": None,
            "object": "text_completion",
            "usage": _last(chunks, "usage"),
        }


Shape = type[ChatShape] | type[CompletionShape]
SHAPES: Mapping[str, Shape] = {"chat_completions": ChatShape, "completions": CompletionShape}
"""Format of the chunks, by the `endpoint` label of the surface."""


Body = Callable[[Sequence[FinishedChoice], CompletionUsage], bytes | BodyLater]


class ChoiceState(Struct):
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
        return "".join(event.text for event in self.found if isinstance(event, ContentDelta))

    def events(self) -> list[Event]:
        """See `FinishedChoice.events`."""
        return joined(self.found)

    def keep(self, events: Sequence[Event]) -> None:
        """Add events of a response that is sent whole."""
        self.found += events

    def finish(self, reason: str | None) -> None:
        """Set the finish reason, if the chunk has one."""
        self.finish_reason = reason or self.finish_reason

    def add_delta(self, delta: Mapping[str, Any]) -> list[Event]:
        """Add a chunk's delta and return its events."""
        events: list[Event] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            events.append(ReasoningDelta(thought))
        if delta.get("content"):
            events.append(ContentDelta(delta["content"]))
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
    """One response of an endpoint other than chat, made of checked chat chunks.

    A client of `/v1/responses` or `/v1/messages` receives the content in the format of its endpoint, through the `Chunks`
    and the body writer of all other responses of that endpoint.
    """

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
                    written += parts_of(self._chunks.begin(self._counted().prompt_tokens))
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
        return b"".join([*ends, *parts_of(self._chunks.usage(self._counted())), self._chunks.end()])

    def failure(self, error: ErrorAnswer) -> bytes:
        """Return the stream events of a failure."""
        return b"".join(parts_of(self._chunks.failure(error)))

    def whole(self, chunks: Sequence[Mapping[str, Any]]) -> bytes | BodyLater:
        """Return the whole response of all chunks, or the function that encodes it."""
        for chunk in chunks:
            for choice, events, _ in self._add_chunk(chunk):
                choice.keep(events)
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
            choice.finish(part.get("finish_reason"))
            changes.append((choice, choice.add_delta(part["delta"]), is_new))
        return changes

    def _counted(self) -> CompletionUsage:
        """Return the worker's usage; zero if it reports none."""
        return self._usage or CompletionUsage(0, 0, 0)


class ForwardedAnswer(BaseAnswer):
    """Response made of the output of a worker that gets the client's request; the receiver of that request."""

    def __init__(
        self,
        exchange: IncomingRequest,
        state: RequestState,
        closed: Closed,
        *,
        model: ServedModel,
        tasks: TaskOwner,
        request: bytes | None = None,
    ) -> None:
        """`request` is sent to the worker; without it, the body of the client's request."""
        super().__init__(exchange, state, closed, lambda _generation, _error: False)
        self._request = request
        self._model = model
        self._tasks = tasks
        self._is_stream = state.request_type == "stream"
        self._has_spoken = False
        self._call: Call | None = None
        self._send: Callable[[], Any] | None = None
        self._attempts = Attempts()

    async def forward(self, instance_id: int | None = None) -> None:
        """Send the client's request to a worker, or to the given one. Raise the error of the last worker tried."""
        body = self._request
        if body is None:
            body = await decoded(self.exchange.body, _as_msgpack)
        request_body = body

        async def send() -> None:
            call = await self._send_to(request_body, instance_id, frozenset(self._attempts.excluded))
            if self.is_over:
                call.kill()
            else:
                self._call = call

        self._send = send
        await send()

    async def _send_to(self, body: bytes, instance_id: int | None, tried: frozenset[int]) -> Call:
        return await self._model.send(
            body,
            self,
            request_id=self.state.request_id,
            instance_id=instance_id,
            headers=self.state.headers,
            metadata=self.state.metadata,
            exclude=tried,
        )

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        """Fail: a bare token is not a chunk."""
        self.fail(Unknown(f"the worker answered token {token_id}: expected a chunk"))

    @abc.abstractmethod
    def on_item(self, item: Item) -> None:
        """Handle one output item; an item without a value is an event, which is not for clients."""

    def on_end(self) -> None:
        """Complete the response; a stream without a chunk is an error."""
        if self.is_over:
            return
        if not self._has_spoken:
            self.fail(StreamIncomplete("the worker ended its stream without an answer"))
            return
        self.finish_with(self.complete)

    def on_error(self, error: Exception) -> None:
        """Handle a worker failure: retry on another worker if the error allows it and the client has seen nothing."""
        if self.is_over:
            return
        if self._call is not None:
            self._attempts.exclude(self._call.instance_id, may_recover=False)
            self._call = None
        is_unseen = self.is_whole or not self._has_spoken
        may_send_again = is_unseen and is_retryable(error) and self._attempts.may_send_again
        if may_send_again and self._send is not None:
            if self._has_spoken:
                self._has_spoken = False
                self.start_over()
            self._attempts.count_send()
            self._tasks.start(self._repeat(error), "retry")
        else:
            self.fail(error)

    async def _repeat(self, error: Exception) -> None:
        assert self._send is not None, "a request is repeated only after it was sent"
        with ErrorBoundary(lambda last: self.fail(more_informative(error, last))):
            await self._send()

    # The response's side.

    def start_over(self) -> None:
        """Discard the output so far, of a response that `is_whole`."""
        raise AssertionError("a response of which the client may have seen a part")

    def touch(self, choice: Any) -> None:
        """Do nothing: there are no token choices."""

    def _cancel_generations(self) -> None:
        if self._call is not None:
            self._call.kill()
            self._call = None


class TextAnswer(ForwardedAnswer):
    """Response made of a worker's own chunks."""

    exchange: ResponseStream

    def __init__(
        self,
        exchange: ResponseStream,
        state: RequestState,
        closed: Closed,
        *,
        model: ServedModel,
        name: str,
        tasks: TaskOwner,
        request: bytes | None = None,
        writer: TextWriter | None = None,
    ) -> None:
        """`writer` converts the chunks to another endpoint's response, and `request` is then sent to the worker."""
        super().__init__(exchange, state, closed, model=model, tasks=tasks, request=request)
        self._writer = writer
        self._name = name
        self._shape = SHAPES.get(state.endpoint, ChatShape)
        self._chunks: list[dict[str, Any]] = []
        self.is_whole = not self._is_stream

    def on_item(self, item: Item) -> None:
        """Handle one chunk; an item without a value is an event, which is not for clients."""
        if self.is_over or item.data is None:
            return
        try:
            chunk = self._shape.check(decode(item.data, item.codec), self._name)
            data = self._event(chunk) if self._is_stream else b""
        except DynamoException as error:
            self.fail(Unknown(str(error)))
            return
        self._has_spoken = True
        self.state.tokens(1, time.perf_counter())
        if self._is_stream:
            self.exchange.write(data)
        else:
            self._chunks.append(chunk)

    def _event(self, chunk: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % json_encode(chunk) if self._writer is None else self._writer.chunk(chunk)

    def start_over(self) -> None:
        self._chunks.clear()

    def complete(self) -> BodyLater | None:
        if self._is_stream:
            self.exchange.end(DONE if self._writer is None else self._writer.end())
        elif self._writer is None:
            self.exchange.respond(200, json_encode(self._shape.fold(self._chunks)))
        else:
            body = self._writer.whole(self._chunks)
            if not isinstance(body, bytes):
                return body
            self.exchange.respond(200, body)
        return None

    def write_error(self, error: ErrorAnswer) -> None:
        if self.exchange.response_started:
            self.exchange.end(error.event() + DONE if self._writer is None else self._writer.failure(error))
        else:
            self.exchange.refuse(error)


def _checked(chunk: Any, content: str, kind: type, object_name: str, model: str) -> dict[str, Any]:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list):
        raise Unknown(f"the worker's chunk has no choices: expected {object_name}")
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get(content), kind):
            raise Unknown(f"a choice of the worker's chunk has no {content}: expected {object_name}")
    return {
        "id": chunk.get("id") or "",
        "choices": choices,
        "created": chunk.get("created") or int(time.time()),
        "model": chunk.get("model") or model,
        **{key: value for key, value in chunk.items() if key not in {"id", "choices", "created", "model"}},
        "object": object_name,
    }


def _add_chat(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index") or 0
    choice = choices.get(index)
    if choice is None:
        message = {"content": None, "refusal": None, "role": "assistant"}
        choice = choices[index] = {"index": index, "message": message, "finish_reason": None, "logprobs": None}
    delta, message = part["delta"], choice["message"]
    for key in ("content", "refusal", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    if delta.get("role"):
        message["role"] = delta["role"]
    for call in delta.get("tool_calls") or ():
        _add_tool_call(message.setdefault("tool_calls", []), call)
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    logged = (part.get("logprobs") or {}).get("content")
    if logged:
        before = (choice["logprobs"] or {}).get("content", [])
        choice["logprobs"] = {"content": [*before, *logged], "refusal": None}


def _joined(before: Any, more: Any) -> Any:
    """Return the concatenated logprobs of a text: lists are joined key by key."""
    if not isinstance(before, dict) or not isinstance(more, dict):
        return before if more is None else more
    return {
        **before,
        **{
            key: [*before[key], *value] if isinstance(value, list) and isinstance(before.get(key), list) else value
            for key, value in more.items()
        },
    }


def _add_tool_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a part of a tool call: the first part has its name, later parts with the same index more arguments."""
    index = part.get("index", len(calls))
    call = next((one for one in calls if one["index"] == index), None)
    if call is None:
        call = {"index": index, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        calls.append(call)
    function = part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""


def _last(chunks: list[dict[str, Any]], key: str) -> Any:
    return next((chunk[key] for chunk in reversed(chunks) if chunk.get(key) is not None), None)


def _as_msgpack(body: bytes) -> bytes:
    """Return a request, already decoded once, in the encoding for workers."""
    return encode_client_json(json_decode(body))


def rewritten(
    surface: Surface, request: ChatCompletionRequest | CompletionRequest, response_id: str, model: str, created: int
) -> tuple[bytes | None, TextWriter | None]:
    """Return body and response writer for a text worker, if the endpoint is neither chat nor completions."""
    if surface.endpoint in SHAPES:
        return None, None
    fields_set = given(msgspec.to_builtins(request))
    if "messages" in fields_set:
        fields_set["messages"] = [given(message) for message in fields_set["messages"]]
    body = partial(surface.body, response_id, model, created)
    return encode_client_json(fields_set), TextWriter(surface.chunks(response_id, model, created), body)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}
