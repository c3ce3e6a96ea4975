"""Next-turn prefill: computes the prompt of a conversation's next turn in advance (`agent_hints.speculative_prefill`).

A template renders an earlier answer differently from how it was generated: without its reasoning, with its end. The worker's
cache therefore lacks the beginning of the next turn, although its text is known as soon as the answer ends. A client
that will continue can have it computed meanwhile: the conversation and the answer are sent once more, for one token that
is discarded, to the worker that generated the answer; with separate prefill workers, through the same prefill worker.
"""

import msgspec

from dynamo.protocols.engine import PreprocessedRequest, Routing, SamplingOptions, StopConditions
from dynamo.protocols.openai import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.generation import Generation
from dynamo.serving.postprocessor import chat_message
from dynamo.serving.served_model import ServedModel
from dynamo.text.answer_parsers import PLAIN, AnswerReader

MODEL = "speculative_prefill"
"""Model name of such a request, as upstream."""


class NextTurnPrefill:
    """Prefill of one conversation's next turn."""

    def __init__(self, model: ServedModel, request: ChatCompletionRequest, reader: AnswerReader | None) -> None:
        self.model = model
        self._preprocessor = model.preprocessor
        self._request = request
        self._reader = reader or PLAIN

    def prompt(self, generation: Generation) -> PreprocessedRequest | None:
        """Return the request for the worker, given the finished answer; None if there is nothing to prefill.

        Raise `InvalidArgument` if the conversation no longer fits into the context.
        """
        if not generation.received_ids:
            return None
        special = self._preprocessor.tokenizer.special_ids - self._reader.shown
        token_ids = [
            token_id for token_id in generation.received_ids if token_id not in special | generation.hidden_stop_ids
        ]
        turns = [*self._request.messages, self._answer(token_ids)]
        shown = msgspec.structs.replace(
            self._request, messages=turns, add_generation_prompt=False, continue_final_message=None, nvext=None
        )
        prepared = self._preprocessor.chat(shown)
        return PreprocessedRequest(
            model=MODEL,
            token_ids=prepared.token_ids,
            stop_conditions=StopConditions(max_tokens=1),
            sampling_options=SamplingOptions(temperature=0.0),
            mdc_sum=prepared.mdc_sum,
            routing=generation.request.routing,
        )

    def _answer(self, token_ids: list[int]) -> ChatMessage:
        """Return the model's answer as a client sends it back."""
        reading = self._reader.reading()
        reading.feed(self._preprocessor.tokenizer.decode(token_ids, skip_special_tokens=False))
        reading.close("")
        message = chat_message(reading.take())
        calls = [
            ToolCall(FunctionCall(call.function.name, call.function.arguments), call.id)
            for call in message.tool_calls or ()
        ]
        return ChatMessage("assistant", content=message.content or "", tool_calls=calls or None)


def next_turn_prefill_of(
    model: ServedModel, request: ChatCompletionRequest, reader: AnswerReader | None
) -> NextTurnPrefill | None:
    """Return the next-turn prefill requested by a client; None for several choices, as any may be continued."""
    hints = request.nvext.agent_hints if request.nvext is not None else None
    is_wanted = hints is not None and bool(hints.speculative_prefill) and (request.n or 1) == 1
    return NextTurnPrefill(model, request, reader) if is_wanted else None


def pinned(ahead: PreprocessedRequest, generation: Generation) -> PreprocessedRequest:
    """Return the request routed to the workers that did prefill and decode of the last turn."""
    prefill = None if generation.dispatch is None else generation.dispatch.prefill
    routing = msgspec.structs.replace(
        ahead.routing or Routing(),
        backend_instance_id=generation.worker_id,
        prefill_worker_id=None if prefill is None else prefill.instance_id,
    )
    return msgspec.structs.replace(ahead, routing=routing)


class NullReceiver:
    """Receiver that discards an answer."""

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""

    def on_end(self) -> None:
        """See `Receiver`."""

    def on_error(self, error: Exception) -> None:
        """See `Receiver`: a failed prefill in advance has no consequence."""
