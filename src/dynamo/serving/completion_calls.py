"""Completion calls: text completions that this process requests as an object and receives as objects.

    async with aclosing(CompletionCall(pipeline.handle_call, request).completions()) as completions:
        async for completion in completions: ...

KServe uses them. A streamed call yields one `TextCompletion` per piece of text, any other call exactly one. Fields for HTTP
clients (`nvext.annotations`, `nvext.extra_fields`, `stream_options`) have no effect.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo.core.codec import decode, encode_client_json, json_encode
from dynamo.core.errors import DynamoException, Unknown
from dynamo.core.tasks import TaskOwner
from dynamo.parsers.base import ContentDelta
from dynamo.protocols.openai import CompletionRequest
from dynamo.protocols.openai_answers import TextChoice, TextCompletion, TextLogprobs
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.answers import BaseAnswer, Closed, Flusher, Retry
from dynamo.serving.choice import Choice
from dynamo.serving.completion_choices import finisher_of
from dynamo.serving.endpoints import COMPLETIONS
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.generation import total_usage
from dynamo.serving.local_requests import LocalCall
from dynamo.serving.postprocessor import text_completion, text_logprobs
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_stream import RequestAccount
from dynamo.serving.served_model import ServedModel
from dynamo.serving.text_models import CompletionShape, ForwardedAnswer

COMPLETION_BYTES = 256  # Size of a completion without its texts, as counted against the limit of unread ones.


class CompletionCall(LocalCall[TextCompletion]):
    """One completion; an `IncomingRequest` for the handler."""

    __slots__ = ("_handler", "request")

    def __init__(
        self,
        handler: Callable[["CompletionCall"], None],
        request: CompletionRequest,
        headers: Sequence[tuple[bytes, bytes]] = (),
        account: RequestAccount | None = None,
    ) -> None:
        """`account`: the caller, closed at the end of the response."""
        super().__init__(b"", headers, account)
        self.request = request
        self._handler = handler

    async def completions(self) -> AsyncGenerator[TextCompletion, None]:
        """Send the request and yield the completions.

        Closing the generator early acts as a client that disconnects. `refusal` is the error that ended the request, if
        any, once the generator has ended. Raise `ResponseTimeout` if the reader is too slow.
        """
        self._handler(self)
        async with aclosing(self._items()) as completions:
            async for completion in completions:
                yield completion

    # Handler interface.

    def deliver(self, completion: TextCompletion) -> None:
        """Add a completion to the response."""
        if self.disconnected or self.response_complete:
            return
        self.response_started = True
        if self._capture is not None:
            self._capture.keep(b"data: %b\n\n" % json_encode(completion))
        self._add(completion, COMPLETION_BYTES + sum(len(choice.text) for choice in completion.choices))

    def end(self) -> None:
        """Complete the response."""
        if not self.disconnected:
            self._complete()

    def refuse(self, error: ErrorAnswer) -> None:
        """End the response with an error."""
        if not self.response_complete:
            self.refusal = error
            self.end()


class CompletionAnswer(BaseAnswer):
    """Response to a `CompletionCall` made of generations."""

    def __init__(
        self, call: CompletionCall, state: RequestState, closed: Closed, retry: Retry, flusher: Flusher
    ) -> None:
        super().__init__(call, state, closed, retry)
        self._call = call
        self._flusher = flusher
        self._is_stream = bool(call.request.stream)
        self.is_whole = not self._is_stream
        self.is_plain = not self._is_stream  # Pieces of plain text are JSON; a streamed call reads strings.
        self._id, self._created = COMPLETIONS.response_id(state.request_id), int(time.time())

    def touch(self, choice: Choice) -> None:
        """Deliver new text at the end of the loop tick; of a whole completion, record the time of the first token."""
        if self._is_stream:
            self._flusher.add(choice)
        elif not self.state.last_s:
            self.state.tokens(1, time.perf_counter())

    def flush(self, choice: Choice, now_s: float) -> None:
        """Deliver the text of the choice; without new text its end, if other choices continue."""
        if self.is_over:
            return
        if self._deliver_text(choice, now_s):
            return
        if choice.finish_reason is not None and len(self.choices()) > 1:
            self._deliver_end(choice)

    def complete(self) -> None:
        if not self._is_stream:
            choices = finisher_of(self._call.request)(self.generations)
            usage = total_usage(self.generations)
            self._call.deliver(text_completion(self._id, self.state.model, self._created, choices, usage))
        else:
            now_s = time.perf_counter()
            for choice in self.choices():
                self._deliver_text(choice, now_s)
                self._deliver_end(choice)
        self._call.end()

    def write_error(self, error: ErrorAnswer) -> None:
        self._call.refuse(error)

    def _deliver_text(self, choice: Choice, now_s: float) -> bool:
        """Deliver each piece of new text, or all of it at once with its log-probabilities; return whether there was any."""
        reading = choice.reading
        assert reading is not None, "the text of a streamed call is read as events"
        texts = [event.text for event in reading.events if isinstance(event, ContentDelta)]
        tokens = reading.fresh_tokens or 1  # Text released by the end of the choice has no token of its own.
        reading.take()
        entries, offset = choice.take_entries()
        if entries:
            self._deliver(choice, "".join(texts), logprobs=text_logprobs(entries, offset))
        else:
            for text in texts:
                self._deliver(choice, text)
        if not texts and not entries:
            return False
        self.state.tokens(tokens, now_s)
        return True

    def _deliver_end(self, choice: Choice) -> None:
        if not choice.is_closed:
            choice.mark_closed()
            self._deliver(choice, "", finish_reason=choice.finish_reason or "stop")

    def _deliver(
        self, choice: Choice, text: str, *, finish_reason: str | None = None, logprobs: TextLogprobs | None = None
    ) -> None:
        piece = TextChoice(text, choice.index, finish_reason, logprobs)
        self._call.deliver(TextCompletion(self._id, [piece], self._created, self.state.model))


class TextCompletionAnswer(ForwardedAnswer):
    """Response to a `CompletionCall` made of a text worker's chunks: their texts and finish reasons."""

    def __init__(
        self, call: CompletionCall, state: RequestState, closed: Closed, *, model: ServedModel, tasks: TaskOwner
    ) -> None:
        fields = {name: value for name, value in msgspec.to_builtins(call.request).items() if value is not None}
        super().__init__(call, state, closed, model=model, tasks=tasks, request=encode_client_json(fields))
        self._caller = call
        self._chunks: list[dict[str, Any]] = []
        self.is_whole = not self._is_stream

    def on_item(self, item: Item) -> None:
        """Handle one chunk; an item without a value is an event, which is not for callers."""
        if self.is_over or item.data is None:
            return
        try:
            chunk = CompletionShape.check(decode(item.data, item.codec), self.state.model)
        except DynamoException as error:
            self.fail(Unknown(str(error)))
            return
        self._has_spoken = True
        self.state.tokens(1, time.perf_counter())
        if not self._is_stream:
            self._chunks.append(chunk)
        elif chunk["choices"]:
            self._caller.deliver(completion_of_chunk(chunk))

    def start_over(self) -> None:
        self._chunks.clear()

    def complete(self) -> None:
        if not self._is_stream:
            self._caller.deliver(completion_of_chunk(CompletionShape.fold(self._chunks)))
        self._caller.end()

    def write_error(self, error: ErrorAnswer) -> None:
        self._caller.refuse(error)


def completion_of_chunk(chunk: dict[str, Any]) -> TextCompletion:
    """Return the texts and finish reasons of a worker's chunk."""
    choices = [
        TextChoice(choice["text"], choice.get("index") or 0, choice.get("finish_reason")) for choice in chunk["choices"]
    ]
    return TextCompletion(chunk["id"], choices, chunk["created"], chunk["model"])
