"""Request pipeline: from a client's request to tokens sent to a worker, and back to response text.

`converse` and `complete` show the steps in order: find the model, preprocess, dispatch. After that nothing is awaited: the
worker's tokens are pushed into the generations, and from there into the response (`generation`, `answers`). A generation
that fails is retried on another worker if possible (`migration`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec

from dynamo.core import tracing
from dynamo.core.codec import json_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.nvext import NvExt
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, decode_chat, decode_completion
from dynamo.serving.announcing import AnswerOptions
from dynamo.serving.answers import BaseAnswer, Closed, Flusher, StreamAnswer, UnaryAnswer
from dynamo.serving.bodies import decoded
from dynamo.serving.completion_choices import chat_finisher, echo_of, finisher_of
from dynamo.serving.endpoints import CHAT, COMPLETIONS, Surface, rewritten, tiered
from dynamo.serving.extras import EXPLAIN, YES, explanation_of, extras_of
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.serving.models import Models
from dynamo.serving.next_turn_prefill import next_turn_prefill_of
from dynamo.serving.open_requests import Open, OpenRequests
from dynamo.serving.placement import headed
from dynamo.serving.postprocessor import chat_body
from dynamo.serving.prefill_router import dispatch_of
from dynamo.serving.relay import Form, OnSuccess, RelayAnswer
from dynamo.serving.request_headers import agent_context, cache_key_context, new_id, trigger_of, with_headers
from dynamo.serving.request_state import RequestState
from dynamo.serving.request_trace.trace import RequestTrace
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.served_model import ServedModel
from dynamo.serving.text_models import TextAnswer
from dynamo.text.answer_parsers import PLAIN, Reader


class Pipeline(OpenRequests):
    """Steps of every generation request."""

    def __init__(
        self,
        models: Models,
        metrics: FrontendMetrics,
        migration: MigrationPolicy | None = None,
        trace: RequestTrace | None = None,
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

    # The main path.

    async def chat(self, exchange: ResponseStream) -> None:
        """Serve a chat completion."""
        decode = partial(decode_chat, ignore_unsupported=self._ignore_unsupported)
        request = await decoded(exchange.body, decode, "chat")
        surface = self._chat if request.service_tier is None else tiered(self._chat)
        await self.converse(exchange, request, surface)

    async def converse(self, exchange: ResponseStream, request: ChatCompletionRequest, surface: Surface) -> None:
        """Serve a chat request of any chat-like endpoint; `surface` defines the response format."""
        self._extend(exchange, request)
        model = self._models.find(request.model, surface.model_type, exchange.account)
        with self._open(exchange, request, model, surface) as answer:
            model.admit()
            if isinstance(answer, TextAnswer):
                await answer.forward(answer.state.headers, answer.state.metadata, chosen_worker(request, model))
                return
            prepared = await model.preprocessor.chat_async(request, len(exchange.body))
            await self._name_images(model, prepared)
            self._place(exchange, model, request, [prepared])
            await self._annotate(answer, model, request, [prepared])
            reader = model.preprocessor.readers.of_chat(request, prepared)
            next_turn_prefill = next_turn_prefill_of(model, request, reader)
            if next_turn_prefill is not None:
                answer.state.plan_next_turn(next_turn_prefill)
            await self._dispatch(model, [prepared], answer, reader)

    async def complete(self, exchange: ResponseStream) -> None:
        """Serve a text completion of one or several prompts."""
        decode = partial(decode_completion, ignore_unsupported=self._ignore_unsupported)
        request = await decoded(exchange.body, decode, "completion")
        self._extend(exchange, request)
        model = self._models.find(request.model, COMPLETIONS.model_type, exchange.account)
        with self._open(exchange, request, model, COMPLETIONS) as answer:
            model.admit()
            if isinstance(answer, TextAnswer):
                await answer.forward(answer.state.headers, answer.state.metadata, chosen_worker(request, model))
                return
            prepared = await model.preprocessor.completion_async(request, len(exchange.body))
            self._place(exchange, model, request, prepared)
            await self._annotate(answer, model, request, prepared)
            echoes = [echo_of(model, request, place, one) for place, one in enumerate(prepared)]
            await self._dispatch(model, prepared, answer, echoes=echoes, is_muted=request.is_echo_alone)

    def _extend(self, exchange: ResponseStream, request: ChatCompletionRequest | CompletionRequest) -> None:
        """Apply routing headers to `nvext`; if extensions are disabled, drop all of `nvext` except `cache_salt`."""
        if self._takes_nvext:
            request.nvext = with_headers(request.nvext, exchange.headers)
        elif request.nvext is not None:
            request.nvext = NvExt(cache_salt=request.nvext.cache_salt)

    def _place(
        self,
        exchange: ResponseStream,
        model: ServedModel,
        request: ChatCompletionRequest | CompletionRequest,
        prepared: Sequence[PreprocessedRequest],
    ) -> None:
        """Check the worker named by the request, and set the agent session of the engine requests."""
        chosen_worker(request, model)
        trigger = trigger_of(request)
        context = agent_context(exchange.headers, trigger) or cache_key_context(request.prompt_cache_key, trigger)
        if context is not None:
            for one in prepared:
                one.agent_context = context
                one.image_cache_scope = context["session_id"]

    def _open(
        self,
        exchange: ResponseStream,
        request: ChatCompletionRequest | CompletionRequest,
        model: ServedModel,
        surface: Surface,
    ) -> Open:
        """Create the response to a decoded request and start its metrics; it ends whatever happens in the block."""
        make = partial(self._answer, request, model, surface)
        return Open(self.adopt(exchange, surface.endpoint, model, make, stream=bool(request.stream)))

    def _answer(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        model: ServedModel,
        surface: Surface,
        exchange: ResponseStream,
        state: RequestState,
        closed: Closed,
    ) -> BaseAnswer:
        """Return a streamed or whole response, as requested."""
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
        extras = extras_of(request.nvext, state) if surface.has_extras else None
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
            await answer.forward(answer.state.headers, answer.state.metadata)

    async def _dispatch(
        self,
        model: ServedModel,
        prepared: Sequence[PreprocessedRequest],
        answer: BaseAnswer,
        reader: Reader | None = None,
        echoes: Sequence[str] = (),
        *,
        is_muted: bool = False,
    ) -> None:
        """Send every engine request of a response; choices are numbered across them."""
        answer.state.prepared(prepared[0].multi_modal_data)
        first_index = 0
        if reader is None and not answer.is_plain:
            reader = PLAIN
        table = model.table(
            skip_special_tokens=prepared[0].output_options.skip_special_tokens is not False,
            shown=frozenset() if reader is None else reader.shown,
        )
        keeps_ids = answer.extras is not None and answer.extras.wants_token_ids
        for place, one in enumerate(prepared):
            generation = Generation(one, table, answer, first_index, reader, keeps_ids=keeps_ids, is_muted=is_muted)
            first_index += len(generation.choices)
            answer.add(generation)
            if place < len(echoes):
                for choice in generation.choices:
                    choice.add(echoes[place])
        parts = list(enumerate(list(answer.generations)))
        if model.is_decode and len(parts) > 1:  # Each waits for its prefill: send all concurrently.
            sends = [self._send(model, answer, one, place) for place, one in parts]
            failed = [end for end in await asyncio.gather(*sends, return_exceptions=True) if end is not None]
            if failed:
                raise failed[0]
        else:
            for place, generation in parts:
                await self._send(model, answer, generation, place)
        answer.state.sent()

    async def _send(self, model: ServedModel, answer: BaseAnswer, generation: Generation, place: int) -> None:
        """Send one engine request, unless the response is over."""
        if answer.is_over:
            return
        state = answer.state
        part_id = state.request_id if place == 0 else new_id()
        route: tracing.Span | None = None
        headers = state.headers
        if self._tracer is not None:
            route = state.begin_route(self._tracer, part_id)
            headers = {**headers, **route.headers()}
        dispatch = dispatch_of(
            model, generation, part_id, headers, metadata=state.metadata, policy=self._migration, metrics=self.metrics
        )
        if state.next_turn_prefill is not None and generation.received_ids is None and self._migration.limit == 0:
            generation.keep_ids()  # Migration after the first token is off: tokens are kept for the next turn's prefill.
        await dispatch.send()
        if place == 0 and answer.exchange.header(EXPLAIN) in YES:
            answer.exchange.header_bytes += explanation_of(generation)
        if generation.call is not None:
            state.sent_to(generation.call.instance_id)
            if route is not None:
                route.set("worker_id", f"{generation.call.instance_id:x}")

    async def _name_images(self, model: ServedModel, prepared: PreprocessedRequest) -> None:
        """Hash images for the KV router, if the number of tokens per image is known."""
        if model.kv is not None and prepared.multi_modal_data is not msgspec.UNSET:
            images = model.preprocessor.images
            if images is not None:
                await images.add(prepared, model.kv.config.block_size)

    async def _annotate(
        self,
        answer: BaseAnswer,
        model: ServedModel,
        request: ChatCompletionRequest | CompletionRequest,
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
        if not dispatch.may_repeat(error):
            return False
        generation.revive()
        self.tasks.start(dispatch.repeat(error), "retry")
        return True


def chosen_worker(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> int | None:
    """Return the worker that the request names, None for any. Raise `InvalidArgument` for an unknown worker."""
    chosen = request.nvext.backend_instance_id if request.nvext is not None else None
    if chosen is not None and chosen not in model.client.instance_ids():
        raise InvalidArgument(
            f"backend_instance_id {chosen} is not a worker of model `{model.name}`", param="nvext.backend_instance_id"
        )
    return chosen
