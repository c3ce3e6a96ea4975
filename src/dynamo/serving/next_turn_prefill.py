"""Speculation: the prompt of a conversation's next turn, computed before it is asked (`agent_hints.speculative_prefill`).

A template shows an old answer in another way than it was generated: without its thoughts, with its end. The worker's
cache therefore lacks the next turn's beginning, although all that it says is known as soon as the answer ends. A client
that will go on can have it computed meanwhile: the conversation and the answer are sent once more, for one token that
nobody reads, to the worker that gave the answer; where another one computes prompts, by way of the one that did.
"""

import msgspec

from dynamo.protocols.engine import PreprocessedRequest, Routing, SamplingOptions, StopConditions
from dynamo.protocols.openai import ChatCompletionRequest, FunctionCall, Message, ToolCall
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.generation import Generation
from dynamo.serving.postprocessor import chat_message
from dynamo.serving.served_model import ServedModel
from dynamo.text.answer_parsers import PLAIN, Reader

MODEL = "speculative_prefill"
"""What such a request calls its model, as upstream has it."""


class Speculation:
    """The next turn of one conversation."""

    def __init__(self, model: ServedModel, request: ChatCompletionRequest, reader: Reader | None) -> None:
        self.model = model
        self._preprocessor = model.preprocessor
        self._request = request
        self._reader = reader or PLAIN

    def prompt(self, generation: Generation) -> PreprocessedRequest | None:
        """What the worker is asked once the answer is known; None where it is not.

        Raises `InvalidArgument` when the conversation no longer fits into the context.
        """
        if not generation.heard:
            return None
        special = self._preprocessor.tokenizer.special_ids - self._reader.shown
        said = [token_id for token_id in generation.heard if token_id not in special | generation.hidden_stop_ids]
        turns = [*self._request.messages, self._answer(said)]
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

    def _answer(self, said: list[int]) -> Message:
        """What the model said, as a client sends it back."""
        reading = self._reader.reading()
        reading.feed(self._preprocessor.tokenizer.decode(said, skip_special_tokens=False))
        reading.close("")
        told = chat_message(reading.take())
        calls = [
            ToolCall(FunctionCall(call.function.name, call.function.arguments), call.id)
            for call in told.tool_calls or ()
        ]
        return Message("assistant", content=told.content or "", tool_calls=calls or None)


def speculation_of(model: ServedModel, request: ChatCompletionRequest, reader: Reader | None) -> Speculation | None:
    """The speculation that a request asks for; of several answers nobody knows which one goes on."""
    hints = request.nvext.agent_hints if request.nvext is not None else None
    is_wanted = hints is not None and bool(hints.speculative_prefill) and (request.n or 1) == 1
    return Speculation(model, request, reader) if is_wanted else None


def led(ahead: PreprocessedRequest, generation: Generation) -> PreprocessedRequest:
    """The same of two legs: to the workers that computed the last prompt and answered it."""
    prefill = None if generation.dispatch is None else generation.dispatch.prefill
    routing = msgspec.structs.replace(
        ahead.routing or Routing(),
        backend_instance_id=generation.worker_id,
        prefill_worker_id=None if prefill is None else prefill.instance_id,
    )
    return msgspec.structs.replace(ahead, routing=routing)


class Unheard:
    """The receiver of an answer that nobody reads."""

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""

    def on_end(self) -> None:
        """See `Receiver`."""

    def on_error(self, error: Exception) -> None:
        """See `Receiver`: what was tried in advance may fail."""
