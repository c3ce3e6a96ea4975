"""HTTP responses made of generations: streamed or whole.

Tokens of one loop tick are written together: the first new piece of a choice since the last write adds the choice to the
`Flusher`'s list, and one callback at the end of the tick writes all pieces of each choice with one `ResponseStream.write`.
"""

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from dynamo.core.codec import json_encode
from dynamo.core.errors import Cancelled, DynamoException
from dynamo.core.memory import free_lists
from dynamo.core.threads import in_few_threads, start_in_few_threads
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.choice import Choice, Frame
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.extras import Extras
from dynamo.serving.generation import Generation, total_usage
from dynamo.serving.next_turn_prefill import NextTurnPrefill
from dynamo.serving.postprocessor import Chunks, OpenAiChunks, parts_of
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_stream import IncomingRequest, ResponseStream
from dynamo.serving.token_path import write_waiting
from dynamo.text.answer_parsing import Reading

logger = logging.getLogger(__name__)

EXPECTED = (DynamoException, OverflowError)
"""Errors of requests and workers; any other one is a defect and logged with its traceback. `OverflowError`: see `answer_to`."""

FREED_HERE_TOKENS = 1 << 16  # Prompts of more tokens are freed in a thread: a million takes 8 ms.

JOINED_BYTES = 64 << 10
"""Longer parts of a stream are not joined with others: 15 MB take some 10 ms."""

BodyLater = Callable[[], bytes]
"""Computes a long body, in a thread."""

WholeBody = Callable[..., bytes | BodyLater]
"""Builds a unary response body from choices and usage, and from `nvext` if present."""

Closed = Callable[["BaseAnswer", str, Exception | None], None]
"""Called when a response is over: the response, its `error_type` label (empty: success), and the exception, if any."""

Retry = Callable[[Generation, Exception], bool]
"""Called when a generation fails; returns True if it is retried on another worker and the response continues."""


class Flusher:
    """Choices with unwritten pieces, written once per loop tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: list[Choice] = []
        """The choices; always the same list, to which choices may append themselves if it is not empty."""

    def add(self, choice: Choice) -> None:
        """Schedule a write of the choice in the current loop tick."""
        if not self.queue:
            self._loop.call_soon(self._flush)
        self.queue.append(choice)

    def _flush(self) -> None:
        """Write the pieces of all scheduled choices."""
        waiting = self.queue.copy()
        self.queue.clear()
        write_waiting(waiting, time.perf_counter())


class BaseAnswer(abc.ABC):
    """Base of streamed and whole responses: their generations and their end."""

    extras: Extras | None = None
    """Extra fields (`nvext`) requested for the response."""
    next_turn_prefill: NextTurnPrefill | None = None
    """Prefill of the conversation's next turn, to start after the response."""
    is_whole = False
    """Whether the client sees nothing of the response before all of it is complete."""
    is_plain = True
    """Whether text may be written piece by piece; otherwise a parser reads all of it (`text.answer_parsing`)."""

    def __init__(self, exchange: IncomingRequest, state: RequestState, closed: Closed, retry: Retry) -> None:
        self.exchange = exchange
        self.state = state
        self.generations: list[Generation] = []
        self.is_over = False
        self._open_count = 0
        self._tokens_seen = 0
        self._spoke_s = 0.0
        self._closed = closed
        self._retry = retry
        exchange.on_disconnect = self.leave

    def add(self, generation: Generation) -> None:
        """Add an engine request to this response."""
        self.generations.append(generation)
        self._open_count += 1

    def drop_generations(self) -> None:
        """Forget the engine requests of a response that is over.

        Without these references it is in no cycle: its some thirty objects are freed at once, and the memory is used again
        while it is in the processor's caches. The garbage collector would free hundreds of responses in one pause.
        """
        generations, self.generations = self.generations, []
        for generation in generations:
            generation.drop_dispatch()
        prompts = [one.request.token_ids for one in generations]
        if sum(map(len, prompts)) > FREED_HERE_TOKENS:
            start_in_few_threads(partial(free_lists, prompts), "free", 1)

    def plan_next_turn(self, prefill: NextTurnPrefill | None) -> None:
        """Prefill the conversation's next turn after the response, if requested."""
        self.next_turn_prefill = prefill

    def spoke_s(self, now_s: float) -> float:
        """Return the time of the workers' last output; new tokens are dated by this call, as they are not timed one by one."""
        tokens = sum(generation.tokens + generation.discarded_tokens for generation in self.generations)
        if tokens != self._tokens_seen:
            self._tokens_seen, self._spoke_s = tokens, now_s
        return max(self._spoke_s, self.state.last_s, self.state.started_s)

    def usage(self) -> CompletionUsage | None:
        """Return the usage so far; None without generations."""
        return total_usage(self.generations) if self.generations else None

    @abc.abstractmethod
    def touch(self, choice: Choice) -> None:
        """Handle new pieces of a choice."""

    def ended(self, generation: Generation) -> None:
        """Release the worker of a complete generation; the last one completes the response."""
        if generation.dispatch is not None:
            generation.dispatch.release()
        self._open_count -= 1
        if self._open_count == 0 and not self.is_over:
            self.finish_with(self.complete)

    def finish_with(self, write: Callable[[], BodyLater | None]) -> None:
        """Write what remains of the response and close it; an exception becomes its error.

        If `write` returns a function, its result is the body of the response, and the response is closed after that.
        """
        try:
            later = write()
        except Exception as error:  # noqa: BLE001 - request boundary: the client gets an error response, whatever failed
            self.fail(error)
            return
        if later is not None:
            made = asyncio.ensure_future(in_few_threads(later, "body writing", 1))
            made.add_done_callback(self._respond_later)
            return
        self.is_over = True
        self._closed(self, "", None)

    def failed(self, generation: Generation, error: Exception) -> None:
        """Retry a failed generation on another worker, or end the response with the error."""
        if not self.is_over and not self._retry(generation, error):
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the response with the error response for `error`."""
        if self.is_over:
            return
        self.is_over = True
        if not isinstance(error, EXPECTED):
            logger.error("request failed", exc_info=error)
        response = answer_to(error)
        with self._closing(response.label, error):
            self._cancel_generations()
            if not self.exchange.disconnected:
                self.write_error(response)

    def leave(self) -> None:
        """Cancel the work of a client that disconnected."""
        if not self.is_over:
            self.is_over = True
            with self._closing("cancelled", Cancelled("the client left")):
                self._cancel_generations()

    @contextlib.contextmanager
    def _closing(self, error_type: str, error: Exception | None) -> Iterator[None]:
        """Close the request's metrics and trace after the block, whether it raises or not."""
        try:
            yield
        except Exception:  # The request boundary: metrics and trace are closed whatever failed.
            logger.exception("failed to end request %s", self.state.request_id)
        finally:
            self._closed(self, error_type, error)

    def _respond_later(self, made: "asyncio.Future[bytes]") -> None:
        """Send the body that a thread has written."""

        def respond() -> None:
            cast("ResponseStream", self.exchange).respond(200, made.result())  # Only whole responses have a body.

        if not self.is_over and not made.cancelled():
            self.finish_with(respond)

    @abc.abstractmethod
    def complete(self) -> BodyLater | None:
        """Write the rest of the response, or return the function that computes its body (see `finish_with`)."""

    @abc.abstractmethod
    def write_error(self, error: ErrorAnswer) -> None:
        """Write the error."""

    def _cancel_generations(self) -> None:
        for generation in self.generations:
            if not generation.is_over:
                generation.cancel()

    def choices(self) -> list[Choice]:
        """Return all choices, by index."""
        return all_choices(self.generations)


def all_choices(generations: Sequence[Generation]) -> list[Choice]:
    """Return the choices of several generations, by index."""
    return [choice for generation in generations for choice in generation.choices]


class UnaryAnswer(BaseAnswer):
    """Whole (unary) response."""

    exchange: ResponseStream
    is_whole = True

    def __init__(
        self,
        exchange: ResponseStream,
        state: RequestState,
        closed: Closed,
        retry: Retry,
        body: WholeBody,
        extras: Extras | None = None,
        shown: Callable[[Sequence[Generation]], list[Choice]] = all_choices,
    ) -> None:
        """`shown` returns the choices of the response; an exception becomes the response."""
        super().__init__(exchange, state, closed, retry)
        self.extras = extras
        self._shown = shown
        self._body = body

    def touch(self, choice: Choice) -> None:
        """Record the time of the first token; later ones are not timed."""
        if not self.state.last_s:
            self.state.tokens(1, time.perf_counter())

    def complete(self) -> BodyLater | None:
        choices = self._shown(self.generations)
        usage = total_usage(self.generations)
        if self.extras is None:
            body = self._body(choices, usage)
        else:
            body = self._body(choices, usage, nvext=self.extras.of_whole(self.generations, choices))
        if not isinstance(body, bytes):
            return body
        self.exchange.respond(200, body)
        return None

    def write_alone(self, body: bytes) -> None:
        """Write a response that no generation contributed to."""
        self.exchange.respond(200, body)

    def write_error(self, error: ErrorAnswer) -> None:
        self.exchange.refuse(error)


class StreamAnswer(BaseAnswer):
    """Stream of server-sent events. The status is sent with the first event, so an earlier error has its own status."""

    exchange: ResponseStream

    def __init__(
        self,
        exchange: ResponseStream,
        state: RequestState,
        closed: Closed,
        retry: Retry,
        *,
        chunks: Chunks,
        flusher: Flusher,
        usage: bool,
        running_usage: bool,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(exchange, state, closed, retry)
        self.extras = extras
        self._decorated = chunks if isinstance(chunks, OpenAiChunks) and (running_usage or extras is not None) else None
        """The chunk writer, if events carry running usage or `nvext`."""
        self._chunks = chunks
        self.is_plain = chunks.plain
        self._flusher = flusher
        self._usage = usage
        self._running_usage = running_usage
        self._tail = chunks.tail() if chunks.plain else b""
        self._has_begun = False
        self._preamble = b""
        """Events that precede everything else (annotations)."""

    def add(self, generation: Generation) -> None:
        super().add(generation)
        for choice in generation.choices:
            choice.join(self._flusher.queue)

    def precede(self, event: bytes) -> None:
        """Add an event that precedes the first chunk."""
        self._preamble += event

    def write_alone(self, body: bytes) -> None:
        """Write a stream of one chunk that no generation contributed to, after the annotations."""
        self.exchange.end(b"%bdata: %b\n\n%b" % (self._preamble, body, self._chunks.end()))

    def touch(self, choice: Choice) -> None:
        self._flusher.add(choice)

    def flush(self, choice: Choice, now_s: float) -> None:
        """Write the pieces of the choice."""
        if self.is_over:
            return
        pieces = choice.pieces
        count = len(pieces)
        if choice.reading is not None and choice.reading.events:
            count = choice.reading.fresh_tokens or 1  # Text released by the end of the choice has no token of its own.
        if count == 0:
            if choice.finish_reason is not None and len(self.choices()) > 1:
                self.exchange.write(self._take(choice) + self._close_choice(choice))
            return
        self.exchange.write(self._take(choice))
        self.state.tokens(count, now_s)

    def complete(self) -> None:
        choices = self.choices()
        count = sum(len(choice.pieces) if choice.reading is None else choice.reading.fresh_tokens for choice in choices)
        if count:
            self.state.tokens(count, time.perf_counter())
        events = [self._take(choice) + self._close_choice(choice) for choice in choices]
        if self._usage:
            events += parts_of(self._chunks.usage(total_usage(self.generations)))
        self._end([*events, self._chunks.end()])

    def write_error(self, error: ErrorAnswer) -> None:
        if self.exchange.response_started:
            self._end(parts_of(self._chunks.failure(error)))
        else:
            self.exchange.refuse(error)

    def _end(self, parts: Sequence[bytes]) -> None:
        """Write the last events and end the stream."""
        if max(map(len, parts)) <= JOINED_BYTES:
            self.exchange.end(b"".join(parts))
        else:
            self.exchange.write_parts(parts)
            self.exchange.end()

    def _carry(self, choice: Choice, *, with_ids: bool = True, is_last: bool = False) -> None:
        """Set the usage and `nvext` of the choice's next event."""
        if self._decorated is None:
            return
        nvext: dict[str, Any] = {}
        if self.extras is not None:
            generation = next(one for one in self.generations if choice in one.choices)
            nvext = self.extras.of_chunk(generation, choice, with_ids=with_ids, is_last=is_last)
        count = json_encode(total_usage(self.generations)) if self._running_usage else b""
        self._decorated.carry(count, json_encode(nvext) if nvext else b"")

    def _take(self, choice: Choice) -> bytes:
        """Return the events of all pieces of the choice (slow path)."""
        opening = b""
        if not choice.is_open:
            is_framed = choice.fast and not self._running_usage and self._decorated is None
            choice.open(self._frame(choice.index) if is_framed else None)
            self._carry(choice, with_ids=False)
            opening = self._chunks.first(choice.index)
            if not self._has_begun:
                self._has_begun = True
                prompt_tokens = sum(len(generation.request.token_ids) for generation in self.generations)
                begun = self._chunks.begin(prompt_tokens)
                if isinstance(begun, bytes):
                    opening = self._preamble + begun + opening
                else:
                    self.exchange.write_parts([self._preamble, *begun, opening])
                    opening = b""
        if choice.reading is not None:
            return opening + self._take_events(choice, choice.reading)
        self._carry(choice)
        pieces = choice.take_pieces()
        if choice.entries is not None:
            return opening + self._take_logprobs(choice, pieces)
        if not pieces:
            return opening
        if choice.frame is not None:
            frame = choice.frame
            return opening + frame.head + frame.separator.join(pieces) + frame.tail
        return opening + self._chunks.head(choice.index) + b"".join(pieces) + self._chunks.tail()

    def _frame(self, index: int) -> Frame:
        return Frame(self._chunks.head(index), self._tail, self.exchange, self.state)

    def _take_events(self, choice: Choice, reading: Reading) -> bytes:
        events = reading.take()
        entries, offset = choice.take_entries()
        if not events and not entries:
            return b""
        if self._decorated is None:
            counted = self._chunks.count(total_usage(self.generations)) if self._chunks.counts else b""
            found = self._chunks.events(choice.index, events, counted, entries, offset)
        else:  # One by one: each chunk carries the tokens since the previous chunk.
            found = b""
            for place in range(max(1, len(events))):
                self._carry(choice)
                logged = entries if place == 0 else []
                found += self._chunks.events(choice.index, events[place : place + 1], b"", logged, offset)
        return found

    def _take_logprobs(self, choice: Choice, pieces: list[bytes]) -> bytes:
        entries, offset = choice.take_entries()
        if not pieces and not entries:
            return b""
        text = b"".join(pieces)
        return self._chunks.text_with_logprobs(choice.index, text, entries, offset)

    def _close_choice(self, choice: Choice) -> bytes:
        if choice.is_closed:
            return b""
        choice.mark_closed()
        self._carry(choice, is_last=True)
        return self._chunks.finish(choice.index, choice.finish_reason or "stop", choice.stop_reason)
