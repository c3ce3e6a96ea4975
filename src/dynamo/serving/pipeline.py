"""Request pipeline: from a client's request to tokens sent to a worker, and back to response text.

`Pipeline.serve` shows the steps in order. What one request carries from step to step is its `RequestState`. A generation
that fails is retried on another worker if possible (`migration`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from dynamo.core.codec import json_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import NotFound
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.nvext import NvExt
from dynamo.protocols.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
    validate_completion,
)
from dynamo.serving.announcing import AnswerOptions
from dynamo.serving.answers import BaseAnswer, Closed, Flusher, StreamAnswer, UnaryAnswer
from dynamo.serving.bodies import decoded
from dynamo.serving.completion_calls import CompletionAnswer, CompletionCall, TextCompletionAnswer
from dynamo.serving.completion_choices import chat_finisher, echoes_of, finisher_of
from dynamo.serving.endpoints import CHAT, COMPLETIONS, Surface, tiered
from dynamo.serving.extras import EXPLAIN, YES, explanation_of, extras_of
from dynamo.serving.generation import Generation
from dynamo.serving.instance_query import answer_query, is_instance_query
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.serving.models import Models
from dynamo.serving.next_turn_prefill import next_turn_prefill_of
from dynamo.serving.open_requests import Open, OpenRequests
from dynamo.serving.postprocessor import chat_body
from dynamo.serving.prefill_router import DisaggregatedDispatch
from dynamo.serving.preparation import chosen_worker, prepared_of
from dynamo.serving.relay import OnSuccess, RelayAnswer
from dynamo.serving.request_headers import headed, new_id, with_headers
from dynamo.serving.request_state import RequestState
from dynamo.serving.response_form import Form
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.served_model import ServedModel
from dynamo.serving.text_models import ForwardedAnswer, TextAnswer, rewritten
from dynamo.text.answer_parsers import PLAIN, AnswerReader

if TYPE_CHECKING:
    from dynamo.serving.request_trace.trace import RequestTrace


GenerationRequest = ChatCompletionRequest | CompletionRequest
GenerationExchange = ResponseStream | CompletionCall

TURN_TOKENS = 16_384
"""Prompt tokens of a batch that are routed and sent in one turn of the loop: about two milliseconds."""


def turns_of(tokens: Sequence[int]) -> list[int]:
    """Return for each prompt of a batch the turn of the loop in which to send it, so that other streams are served."""
    return [before // TURN_TOKENS for before in accumulate(tokens[:-1], initial=0)]


class Pipeline(OpenRequests):
    """Steps of every generation request."""

    def __init__(
        self,
        models: Models,
        metrics: FrontendMetrics,
        migration: MigrationPolicy | None = None,
        trace: "RequestTrace | None" = None,
        answers: AnswerOptions | None = None,
    ) -> None:
        super().__init__(metrics, trace)
        answers = answers or AnswerOptions()
        self._chat = replace(
            CHAT, chunks=answers.chunks, body=partial(chat_body, reasoning_field=answers.reasoning_field)
        )
        self._models = models
        self._migration = migration or MigrationPolicy()
        self._flusher = Flusher(asyncio.get_running_loop())
        self._ignore_unsupported = setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool)
        self._always_usage = setting("DYN_ENABLE_FORCE_INCLUDE_USAGE", False, read_bool)
        self._takes_nvext = not setting("DYN_DISABLE_FRONTEND_NVEXT", False, read_bool)

    # Route handlers: called on the loop with a complete request.

    def handle_chat(self, exchange: ResponseStream) -> None:
        """POST /v1/chat/completions."""
        self.start(exchange, self._chat, self.chat(exchange))

    def handle_completion(self, exchange: ResponseStream) -> None:
        """POST /v1/completions."""
        self.start(exchange, COMPLETIONS, self.complete(exchange))

    def handle_call(self, call: CompletionCall) -> None:
        """Serve a text completion that this process requests as an object."""
        self.start(call, COMPLETIONS, self.complete_call(call))

    async def chat(self, exchange: ResponseStream) -> None:
        """Serve a chat completion."""
        decode = partial(decode_chat, ignore_unsupported=self._ignore_unsupported)
        request = await decoded(exchange.body, decode, "chat")
        await self.serve(exchange, request, self._chat if request.service_tier is None else tiered(self._chat))

    async def complete(self, exchange: ResponseStream) -> None:
        """Serve a text completion of one or several prompts."""
        decode = partial(decode_completion, ignore_unsupported=self._ignore_unsupported)
        request = await decoded(exchange.body, decode, "completion")
        await self.serve(exchange, request, COMPLETIONS)

    async def complete_call(self, call: CompletionCall) -> None:
        """Serve a text completion requested as an object."""
        validate_completion(call.request)
        await self.serve(call, call.request, COMPLETIONS)

    # The main path.

    async def serve(self, exchange: GenerationExchange, request: GenerationRequest, surface: Surface) -> None:
        """Serve a decoded request of any chat-like endpoint or a text completion: every step, in order.

        `surface` defines the form of the response. After the last step nothing is awaited: the worker's tokens are pushed
        into the generations (`generation`), and from there into the response stream (`answers`).
        """
        self._apply_headers(exchange, request)
        model = self._models.find(request.model, surface.model_type, exchange.account)
        with self._open(exchange, request, model, surface) as answer:
            model.admit()
            if isinstance(
                answer, ForwardedAnswer
            ):  # Its workers take the client's request: they preprocess it themselves.
                await answer.forward(chosen_worker(request, model))
                return
            prepared = await self._preprocess(answer, model, request)
            if isinstance(answer, StreamAnswer | UnaryAnswer) and is_instance_query(request, model, surface):
                await answer_query(answer, model, surface, prepared[0])
                return
            echoes = await echoes_of(model, request, prepared) if isinstance(request, CompletionRequest) else ()
            if answer.is_over:  # The client left; what is added to a response that is over would stay in a cycle.
                return
            self._begin_generations(answer, model, request, prepared, echoes)
            self._route(answer, model)
            await self._send(answer, model)

    def _apply_headers(self, exchange: GenerationExchange, request: GenerationRequest) -> None:
        """Apply routing headers to `nvext`; if extensions are disabled, drop all of `nvext` except `cache_salt`."""
        if self._takes_nvext:
            request.nvext = with_headers(request.nvext, exchange.headers)
        elif request.nvext is not None:
            request.nvext = NvExt(cache_salt=request.nvext.cache_salt)

    async def _preprocess(
        self, answer: BaseAnswer, model: ServedModel, request: GenerationRequest
    ) -> Sequence[PreprocessedRequest]:
        """Return the engine requests: prompt tokens, image hashes, agent session. Raise `InvalidArgument`."""
        exchange = answer.exchange
        prepared = await prepared_of(model, request, exchange.headers, len(exchange.body))
        await self._annotate(answer, model, request, prepared)
        answer.state.prepared(prepared[0].multi_modal_data)
        return prepared

    def _begin_generations(
        self,
        answer: BaseAnswer,
        model: ServedModel,
        request: GenerationRequest,
        prepared: Sequence[PreprocessedRequest],
        echoes: Sequence[str],
    ) -> None:
        """Create the receivers of the engine requests' tokens; choices are numbered across them."""
        reader: AnswerReader | None = None
        is_muted = False
        if isinstance(request, ChatCompletionRequest):
            reader = model.preprocessor.readers.of_chat(request, prepared[0])
            if request.nvext is not None:
                answer.plan_next_turn(next_turn_prefill_of(model, request, reader))
        else:
            is_muted = request.is_echo_alone
        if reader is None and not answer.is_plain:
            reader = PLAIN
        table = model.table(
            skip_special_tokens=prepared[0].output_options.skip_special_tokens is not False,
            shown=frozenset() if reader is None else reader.shown,
        )
        keeps_ids = answer.extras is not None and answer.extras.wants_token_ids
        first_index = 0
        for place, one in enumerate(prepared):
            generation = Generation(
                one, table, answer, first_index, reader,
                keeps_ids=keeps_ids, is_muted=is_muted, echo=echoes[place] if echoes else "",
            )  # fmt: skip
            first_index += len(generation.choices)
            answer.add(generation)
            generation.begin()

    def _route(self, answer: BaseAnswer, model: ServedModel) -> None:
        """Give every engine request a dispatch, which chooses its workers: for each phase, and again after a failure."""
        state = answer.state
        make = DisaggregatedDispatch if model.is_decode else Dispatch
        state.route_through(model.routed, self.metrics.phase(make.phase))
        for place, generation in enumerate(answer.generations):
            part_id = state.request_id if place == 0 else new_id()
            headers = state.headers
            if self._tracer is not None:
                headers = {**headers, **state.begin_route(self._tracer, part_id).headers()}
            dispatch = make(
                model, generation, part_id, headers,
                metadata=state.metadata, policy=self._migration, metrics=self.metrics,
            )  # fmt: skip
            generation.assign(dispatch)
            if answer.next_turn_prefill is not None and generation.received_ids is None and self._migration.limit == 0:
                generation.keep_ids()  # Migration is off: the tokens are kept for the next turn's prefill.

    async def _send(self, answer: BaseAnswer, model: ServedModel) -> None:
        """Send every engine request of a response. Raise the error of the last worker tried."""
        generations = list(answer.generations)
        turns = turns_of([len(one.request.token_ids) for one in generations])
        if model.is_decode and len(generations) > 1:  # Each waits for its prefill: send all concurrently.
            sends = [self._send_part(answer, place, one, turns[place]) for place, one in enumerate(generations)]
            failed = [end for end in await asyncio.gather(*sends, return_exceptions=True) if end is not None]
            if failed:
                raise failed[0]
        else:
            passed = 0
            for place, generation in enumerate(generations):
                await self._send_part(answer, place, generation, turns[place] - passed)
                passed = turns[place]
        answer.state.sent()

    async def _send_part(self, answer: BaseAnswer, place: int, generation: Generation, turns: int) -> None:
        """Send one engine request after so many turns of the loop, unless the response is over."""
        for _ in range(turns):
            await asyncio.sleep(0)
        if answer.is_over:
            return
        dispatch = generation.dispatch
        assert dispatch is not None, "it is set by `_route`"
        await dispatch.send()
        if place == 0 and answer.exchange.header(EXPLAIN) in YES:
            answer.exchange.header_bytes += explanation_of(generation)
        if generation.call is not None:
            decision = dispatch.decision
            dp_rank = None if decision is None else decision.dp_rank
            answer.state.sent_to(generation.call.instance_id, place, dp_rank)

    # Parts of the steps.

    def _open(
        self,
        exchange: GenerationExchange,
        request: GenerationRequest,
        model: ServedModel,
        surface: Surface,
    ) -> Open:
        """Create the response to a decoded request and start its metrics; it ends whatever happens in the block."""
        make = partial(self._answer, request, model, surface)
        return Open(self.adopt(exchange, surface.endpoint, model, make, stream=bool(request.stream)))

    def _answer(
        self,
        request: GenerationRequest,
        model: ServedModel,
        surface: Surface,
        exchange: GenerationExchange,
        state: RequestState,
        closed: Closed,
    ) -> BaseAnswer:
        """Return a streamed or whole response, as requested."""
        if isinstance(exchange, CompletionCall):
            if model.takes_text:
                return TextCompletionAnswer(exchange, state, closed, model=model, tasks=self.tasks)
            return CompletionAnswer(exchange, state, closed, self._retry, self._flusher)
        response_id, created = surface.response_id(state.request_id), int(time.time())
        if model.takes_text:
            rewritten_body, writer = rewritten(surface, request, response_id, model.name, created)
            return TextAnswer(
                exchange,
                state,
                closed,
                model=model,
                name=model.name,
                tasks=self.tasks,
                request=rewritten_body,
                writer=writer,
            )
        extras = extras_of(request.nvext, state) if surface.has_extras and request.nvext is not None else None
        if not request.stream:
            body = partial(surface.body, response_id, model.name, created)
            shown = chat_finisher(request) if isinstance(request, ChatCompletionRequest) else finisher_of(request)
            return UnaryAnswer(exchange, state, closed, self._retry, body, extras, shown)
        options = request.stream_options
        return StreamAnswer(
            exchange,
            state,
            closed,
            self._retry,
            chunks=surface.chunks(response_id, model.name, created),
            flusher=self._flusher,
            usage=surface.always_usage or self._always_usage or (options is not None and bool(options.include_usage)),
            running_usage=options is not None and bool(options.continuous_usage_stats),
            extras=extras,
        )

    async def relay(
        self,
        exchange: ResponseStream,
        endpoint: str,
        model: ServedModel,
        make: Callable[[str], bytes | PreprocessedRequest],
        form: Form,
        *,
        stream: bool = False,
        on_success: OnSuccess | None = None,
        tokens: PreprocessedRequest | None = None,
    ) -> None:
        """Relay a request in the worker's own form, which `make` builds from the request id; `form` builds the response.

        `tokens` describes the request to a KV router if its body is not in tokens. Raise `NotFound` for such a request if
        separate workers compute prompts.
        """
        if tokens is not None and model.is_decode:
            raise NotFound(
                f"Model not found: {model.name!r} is served by prefill and decode workers, which only generate"
            )
        if self._takes_nvext:
            with_headers(None, exchange.headers)  # Refuse invalid headers before the metrics of the request begin.

        def made(_: ResponseStream, state: RequestState, closed: Closed) -> RelayAnswer:
            written = make(state.request_id)
            body, prompt = (b"", written) if isinstance(written, PreprocessedRequest) else (written, tokens)
            if prompt is not None and self._takes_nvext:
                prompt = headed(prompt, exchange.headers)
            return RelayAnswer(
                exchange, state, closed,
                model=model, tasks=self.tasks, request=body, form=form, on_success=on_success, prompt=prompt,
            )  # fmt: skip

        answer = self.adopt(exchange, endpoint, model, made, stream=stream)
        with Open(answer):
            model.admit()
            await answer.forward()

    async def _annotate(
        self,
        answer: BaseAnswer,
        model: ServedModel,
        request: GenerationRequest,
        prepared: Sequence[PreprocessedRequest],
    ) -> None:
        """Add the events requested by `nvext.annotations`, which precede the first chunk."""
        wanted = request.nvext.annotations if request.nvext is not None else None
        if not wanted or not isinstance(answer, StreamAnswer):
            return
        known: dict[str, Callable[[], object]] = {
            "request_id": lambda: answer.state.request_id,
            "token_ids": lambda: prepared[0].token_ids,
        }
        if "formatted_prompt" in wanted:
            render = partial(model.preprocessor.formatted_prompt, request)
            if isinstance(request, ChatCompletionRequest):
                prompt = await model.preprocessor.rendered(request, len(answer.exchange.body), render)
            else:
                prompt = render()
            known["formatted_prompt"] = lambda: prompt
        for name in dict.fromkeys(wanted):
            if name in known:
                what = known[name]()
                value = json_encode(what if isinstance(what, str) else json_encode(what).decode())
                answer.precede(b"event: %b\n: %b\n\n" % (name.encode(), value))

    def _retry(self, generation: Generation, error: Exception) -> bool:
        dispatch = generation.dispatch
        if not isinstance(dispatch, Dispatch):
            return False
        refusal = dispatch.refusal(error)
        if refusal is not None:
            cast(BaseAnswer, generation.answer).fail(refusal)
            return True
        tokens = generation.tokens
        if not dispatch.may_repeat(error):
            return False
        generation.revive()
        answer = cast(BaseAnswer, generation.answer)
        state = answer.state
        if state.routes:
            part = answer.generations.index(generation)
            state.moved(part, generation.failed_instance, error, tokens)
        silent_s = state.last_s if state.request_type == "stream" else 0.0
        self.tasks.start(dispatch.repeat(error, silent_s), "retry")
        return True
