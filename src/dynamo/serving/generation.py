"""Generation: one active engine request, from received tokens to pieces of text.

A `Generation` is the receiver of one request (see `runtime.request_plane.base`). It counts tokens, turns them into
JSON-escaped pieces of its `Choice`s, detects stop strings, and notifies its `Answer`. Bare tokens arrive at `on_token`
(`token_path`): one list look-up and one list append. A choice with a parser (`text.answer_parsing`) has events instead of pieces.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dynamo.core.codec import json_decoder, msgpack_decoder
from dynamo.core.errors import Cancelled, Unknown
from dynamo.protocols.engine import (
    CompletionTokensDetails,
    CompletionUsage,
    EngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
)
from dynamo.runtime.request_plane.base import Call, Item
from dynamo.serving.choice import Choice, Touched
from dynamo.serving.postprocessor import FINISH_REASONS, TokenEntry, alternatives
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.token_path import on_token
from dynamo.text.answer_parsers import AnswerReader
from dynamo.text.detokenizer import Detokenizer, TokenTable

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision

_decode = {"msgpack": msgpack_decoder(EngineOutput).decode, "json": json_decoder(EngineOutput).decode}


class Answer(Touched, Protocol):
    """Response made of generations."""

    is_whole: bool
    """Whether the client sees nothing of the response before all of it is complete."""

    def ended(self, generation: "Generation") -> None:
        """Handle a complete generation: each of its choices has a finish reason."""

    def failed(self, generation: "Generation", error: Exception) -> None:
        """Handle a failed generation."""


class Way(Protocol):
    """Dispatch of a generation to a worker."""

    decision: "Decision | None"
    """Latest decision of the KV router, if one chooses."""
    prefill: PrefillPhase | None
    """Prefill phase, if the prompt was computed by another worker."""

    async def send(self) -> None:
        """Choose a worker and send the request. Raise the error of the last worker tried."""

    def release(self) -> None:
        """Release the request's worker in the routers that count it."""

    def can_move(self) -> bool:
        """Return whether another worker could take over from the present one."""


class Generation:
    """Receiver of one engine request."""

    __slots__ = (
        "_choice",
        "_is_cut",
        "_is_resumed",
        "_keeps_ids",
        "_last_worker",
        "_logs_ends",
        "_reader",
        "_table",
        "_texts",
        "answer",
        "call",
        "choices",
        "discarded_tokens",
        "dispatch",
        "echo",
        "engine_data",
        "failed_instance",
        "first_index",
        "hidden_stop_ids",
        "is_muted",
        "is_over",
        "received_ids",
        "request",
        "tokens",
        "usage",
    )

    def __init__(
        self,
        request: PreprocessedRequest,
        table: TokenTable,
        answer: Answer,
        first_index: int,
        reader: AnswerReader | None = None,
        *,
        keeps_ids: bool = False,
        is_muted: bool = False,
        echo: str = "",
    ) -> None:
        """Create it. `reader` makes the parsers of the texts, if any. A muted generation discards the worker's tokens.

        `echo` precedes every text.
        """
        self.request = request
        self.echo = echo
        self._reader = reader
        self._keeps_ids = keeps_ids
        self._logs_ends = request.output_options.prompt_logprobs is not None
        """Whether the token that ends the answer has an entry: who scores prompts drops one token at the end of all."""
        self.is_muted = is_muted
        """Whether only the prompt is requested: workers generate at least one token, which is not part of the response."""
        self._last_worker: int | None = None
        self.engine_data: dict[str, Any] = {}
        """The engine's `engine_data`, unchanged."""
        self.answer = answer
        self.first_index = first_index
        self._table = table
        self._texts = table.text_json
        self.tokens = 0
        """Output tokens of all choices."""
        self.discarded_tokens = 0
        """Output tokens of attempts that were followed by another one from the beginning."""
        self.usage: CompletionUsage | None = None
        """Usage as counted by the engine, if reported."""
        self.call: Call | None = None
        self.is_over = False
        self.received_ids: list[int] | None = None
        """All tokens so far, if the request may be resumed on another worker after its first token; else None."""
        self.failed_instance: int | None = None
        """Worker on which it failed; excluded from the next choice."""
        self._is_resumed = False
        self._is_cut = False
        self.dispatch: Way | None = None
        """Dispatch of the request."""
        self.hidden_stop_ids = frozenset(request.stop_conditions.stop_token_ids_hidden or ())
        self._make_choices()

    def _make_choices(self) -> None:
        self.choices = [self._make_choice(index) for index in range(self.request.sampling_options.n or 1)]
        self._choice = self.choices[0]
        self._choice.received(None)

    def _make_choice(self, index: int) -> Choice:
        stop = self.request.stop_conditions.stop or ()
        wants_logprobs = self.request.output_options.logprobs is not None
        keeps_stop = self.request.sampling_options.include_stop_str_in_output or (
            self.request.output_options.no_stop_trim is True
        )
        detokenizer = Detokenizer(self._table, stop, include_stop=bool(keeps_stop))
        reading = None if self._reader is None else self._reader.reading()
        return Choice(
            self.first_index + index,
            self.answer,
            detokenizer,
            fast=not (stop or wants_logprobs or self._keeps_ids or self.is_muted) and reading is None,
            logprobs=wants_logprobs,
            reading=reading,
            keeps_ids=self._keeps_ids,
        )

    # The receiver's side of the request plane.

    on_token = on_token

    def on_slow_token(self, choice: Choice, token_id: int) -> None:
        """Handle a token that `on_token` has counted and that is not a complete text of a plain choice."""
        if choice.finish_reason is not None:
            self.tokens -= 1  # Other choices continue; later output of this choice is neither shown nor counted.
        elif not self.is_over:
            self._slow(choice, token_id)

    def on_item(self, item: Item) -> None:
        """Handle every engine output other than a bare token."""
        if item.data is None or self.is_over:
            return
        try:
            output = _decode[item.codec](item.data)
        except ValueError as error:
            self._fail(Unknown(f"the worker's output cannot be read: {error}"))
            return
        self._take(output)

    def on_end(self) -> None:
        """Handle the end of the stream."""
        if self.is_over:
            return
        if any(choice.finish_reason is None for choice in self.choices):
            # A worker may return fewer choices than requested. Choice 0 is always part of the response, empty if the worker
            # ends the stream without output, as a router does that only ends an agent's session.
            self.choices = [one for one in self.choices if one.finish_reason is not None or one.has_spoken]
            for choice in self.choices:
                if choice.finish_reason is None:
                    choice.close("stop")
        self._over()

    def on_error(self, error: Exception) -> None:
        """Handle a broken stream; if all choices have finished, only the end marker is missing and nothing is lost."""
        if self.is_over:
            return
        if all(choice.finish_reason is not None for choice in self.choices):
            self._over()
        else:
            self._fail(error)

    def leaves_silent_worker(self) -> bool:
        """Worker is unresponsive: migrate if another instance is available."""
        return not self.is_over and self.dispatch is not None and self.dispatch.can_move()

    # The dispatch's side.

    def assign(self, dispatch: Way) -> None:
        """Set the dispatch that sends the request."""
        self.dispatch = dispatch

    def attach(self, call: Call) -> None:
        """Set the active request to a worker."""
        self.call = call

    def keep_ids(self) -> None:
        """Keep all tokens from now on."""
        self.received_ids = []

    def drop_dispatch(self) -> None:
        """Forget the dispatch of a generation that is over; the two refer to each other."""
        self.dispatch = self.call = None

    def excuse_worker(self) -> None:
        """Do not blame the worker of the last failure, which another one caused."""
        self.failed_instance = None

    def cancel(self) -> None:
        """Cancel after the client disconnected: the worker stops at its next step and its output is discarded."""
        self.is_over = True
        if self.call is not None:
            self.call.kill()
            self.call = None

    @property
    def can_start_over(self) -> bool:
        """Whether the output so far may be discarded, because the client has not seen any of it."""
        return self.answer.is_whole

    def start_over(self) -> None:
        """Discard the output so far."""
        self.discarded_tokens += self.tokens
        self.tokens = 0
        self.usage = None
        self.engine_data = {}
        self._is_cut = False
        if self.received_ids is not None:
            self.received_ids = []
        self._make_choices()
        self.begin()

    def begin(self) -> None:
        """Begin every text with the echo, if there is one."""
        if self.echo:
            for choice in self.choices:
                choice.add(self.echo)

    def revive(self) -> None:
        """Prepare a failed generation for another worker."""
        assert self.tokens == 0 or self.received_ids is not None, "a generation without its tokens cannot be resumed"
        self.is_over = False
        self._is_resumed = self.tokens > 0

    def thinking_tokens(self) -> int:
        """Return the number of reasoning tokens so far; all tokens if no parser separates reasoning from text."""
        if self._reader is None or not self._reader.finds_thoughts:
            return self.tokens
        return sum(choice.reading.reasoning_tokens for choice in self.choices if choice.reading is not None)

    def end_spent(self) -> None:
        """End a generation that has received all its tokens and lacks only its end."""
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.close("length")
        self._over()

    def broke(self, error: Exception) -> None:
        """End with the error: no other worker can take the request."""
        self.answer.failed(self, error)

    @property
    def worker_id(self) -> int | None:
        """Return the present or last worker."""
        return self._last_worker if self.call is None else self.call.instance_id

    def counted(self) -> CompletionUsage:
        """Return the engine's usage if it reported one for the whole request, else ours; reasoning is always counted here."""
        usage = self.usage
        if usage is None or self._is_resumed or self._is_cut or self.is_muted:
            prompt, tokens = len(self.request.token_ids), 0 if self.is_muted else self.tokens
            details = None if usage is None else usage.prompt_tokens_details
            usage = CompletionUsage(prompt, tokens, prompt + tokens, details)
        if self._reader is not None and self._reader.finds_thoughts:
            thoughts = sum(choice.reading.reasoning_tokens for choice in self.choices if choice.reading is not None)
            usage.completion_tokens_details = CompletionTokensDetails(thoughts)
        return usage

    def _take(self, output: EngineOutput) -> None:
        index = output.index or 0  # Released workers send null for a single choice.
        if index >= len(self.choices):
            self._fail(Unknown(f"the worker answered choice {index} of {len(self.choices)}"))
            return
        choice = self.choices[index]
        if output.engine_data:
            self.engine_data |= output.engine_data
        if choice.finish_reason is None:
            choice.received(output.cum_log_probs)
            self._take_tokens(choice, output)
        if output.completion_usage is not None:
            self._add_usage(output.completion_usage)
        if output.finish_reason is not None and not self.is_over:
            self._take_finish(choice, output)

    def _take_tokens(self, choice: Choice, output: EngineOutput) -> None:
        ids = output.token_ids
        if self.is_muted:
            self.tokens += len(ids)
            return
        ends = output.finish_reason in ("eos", "stop")
        for place, token_id in enumerate(ids):
            self.tokens += 1
            if self.received_ids is not None:
                self.received_ids.append(token_id)
            is_stop = ends and place == len(ids) - 1 and token_id in self.hidden_stop_ids
            if choice.entries is not None and (not is_stop or self._logs_ends):
                self._log(choice, output, place)
            if not is_stop:
                self._push(choice, token_id)
            if self.is_over or choice.finish_reason is not None:
                return

    def _push(self, choice: Choice, token_id: int) -> None:
        """Handle a token of any choice, as `on_token`."""
        piece = self._texts[token_id] if choice.is_plain and token_id < len(self._texts) else None
        if piece is None:
            self._slow(choice, token_id)
        elif piece:
            choice.add_piece(piece)

    def _slow(self, choice: Choice, token_id: int) -> None:
        if self.is_muted:
            return
        if token_id in self.hidden_stop_ids:
            self._stop(choice)  # The worker did not report a finish here; end the choice as upstream's frontend does.
            return
        if choice.push(token_id):
            self._stop(choice)

    def _stop(self, choice: Choice) -> None:
        """End the choice at a stop condition detected here; stop the worker after the last choice."""
        self._is_cut = True  # Later engine output of this choice is neither shown nor counted.
        choice.cut()
        if all(one.finish_reason is not None for one in self.choices):
            if self.call is not None:
                self.call.kill()
            self._over()

    def _log(self, choice: Choice, output: EngineOutput, place: int) -> None:
        token_id = output.token_ids[place]
        logprob = output.log_probs[place] if output.log_probs and place < len(output.log_probs) else 0.0
        tops = output.top_logprobs[place] if output.top_logprobs and place < len(output.top_logprobs) else []
        wanted = self.request.output_options.logprobs or 0
        top = [(*self.token(one.token_id), one.logprob) for one in alternatives(tops, wanted)]
        assert choice.entries is not None
        choice.entries.append(TokenEntry(token_id, *self.token(token_id), logprob, top))

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return text and bytes of a token, as in a logprob entry."""
        raw = self._table.raw[token_id] if token_id < len(self._table.raw) else b""
        if self.request.output_options.return_tokens_as_token_ids:
            return f"token_id:{token_id}", raw
        return raw.decode("utf-8", "replace"), raw

    def _add_usage(self, usage: CompletionUsage) -> None:
        if self.usage is None or len(self.choices) == 1:
            self.usage = usage
        else:
            self.usage.completion_tokens += usage.completion_tokens
            self.usage.total_tokens += usage.completion_tokens

    def _take_finish(self, choice: Choice, output: EngineOutput) -> None:
        reason = output.finish_reason or ""
        if reason in FINISH_REASONS and self.is_muted:
            choice.close("length")
        elif reason in FINISH_REASONS:
            choice.finish(FINISH_REASONS[reason], output.stop_reason)
        elif reason == "cancelled":
            self._fail(Cancelled("the worker cancelled the request"))
        else:
            self._fail(Unknown(reason.removeprefix("error:").strip() or "the engine failed"))

    def _over(self) -> None:
        self.is_over = True
        self._last_worker = self.worker_id
        self.call = None
        self.answer.ended(self)

    def _fail(self, error: Exception) -> None:
        self.is_over = True
        if self.call is not None:
            self.failed_instance = self.call.instance_id
            self.call.kill()
            self.call = None
        self.answer.failed(self, error)


def total_usage(generations: Sequence[Generation]) -> CompletionUsage:
    """Return the usage of a response: the sum over its engine requests."""
    counts = [generation.counted() for generation in generations]
    if len(counts) == 1:
        return counts[0]
    prompt = sum(count.prompt_tokens for count in counts)
    completion = sum(count.completion_tokens for count in counts)
    cached = [one.prompt_tokens_details.cached_tokens for one in counts if one.prompt_tokens_details is not None]
    thoughts = [one.completion_tokens_details for one in counts if one.completion_tokens_details is not None]
    return CompletionUsage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(sum(one or 0 for one in cached)) if cached else None,
        CompletionTokensDetails(sum(one.reasoning_tokens for one in thoughts)) if thoughts else None,
    )
