"""The main path: a request's text in, tokens to a worker, text back.

`converse` and `complete` read like the manual: find the model, preprocess, dispatch. From there on nothing is
awaited: the worker's tokens are pushed into the generations, and those into the answer (`llm.generation`,
`llm.http.answers`). A generation that breaks off is taken to another worker where that can be (`llm.migration`).
"""

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from dynamo.core import tracing
from dynamo.core.codec import json_encode, msgpack_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, ResponseTimeout
from dynamo.core.logging import current_request, scope_fields
from dynamo.core.tasks import TaskOwner
from dynamo.llm.announcing import AnswerOptions
from dynamo.llm.extras import EXPLAIN, YES, explanation_of, extras_of
from dynamo.llm.generation import Choice, Generation, best_choices
from dynamo.llm.http.answers import BaseAnswer, Closed, Flusher, StreamAnswer, UnaryAnswer, all_choices
from dynamo.llm.http.errors import ErrorAnswer, answer_to
from dynamo.llm.http.metrics import FrontendMetrics, RequestRecord
from dynamo.llm.http.protocol import Exchange
from dynamo.llm.migration import Dispatch, MigrationPolicy
from dynamo.llm.models import Models
from dynamo.llm.placement import Placement, headed
from dynamo.llm.postprocessor import (
    ChatChunks,
    Chunks,
    CompletionChunks,
    chat_body,
    completion_body,
)
from dynamo.llm.prefill_router import dispatch_of
from dynamo.llm.readers import PLAIN, Reader
from dynamo.llm.relay import Form, OnSuccess, RelayAnswer
from dynamo.llm.request_headers import agent_context, trigger_of, with_headers
from dynamo.llm.request_trace import RequestTrace
from dynamo.llm.served_model import ServedModel
from dynamo.llm.speculation import Speculation, Unheard, speculation_of
from dynamo.llm.text_models import SHAPES, TextAnswer
from dynamo.llm.text_surfaces import TextWriter
from dynamo.protocols.engine import CompletionUsage, PreprocessedRequest
from dynamo.protocols.nvext import NvExt
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, decode_chat, decode_completion

logger = logging.getLogger(__name__)

Made = TypeVar("Made", bound=BaseAnswer)

TRACE_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")
SPAN_HEADERS = (b"traceparent", b"tracestate")
META_HEADER = b"x-dynamo-meta-"
COMMENT = b":\n\n"
"""What a reader of server-sent events passes over."""
SERVICE_TIER = "default"
"""The only one there is, whichever a request asks for."""


@dataclass(frozen=True, slots=True)
class Surface:
    """What one endpoint of the API has of its own. One whose answers repeat the request is made for each of them."""

    endpoint: str
    """The `endpoint` label of the metrics."""
    model_type: str
    """The model type that serves it (serving-plane.md §2.3)."""
    response_id: Callable[[str], str]
    """The response's id, made of the request's, which is a UUID."""
    chunks: Callable[..., Chunks]
    """Makes the events of a stream from response id, model and creation time."""
    body: Callable[..., bytes]
    """Makes a whole response from the same, its choices and its usage; from its `nvext` too where `has_extras`."""
    error_body: Callable[[ErrorAnswer], bytes] = ErrorAnswer.body
    """Writes an error that comes before the stream."""
    always_usage: bool = False
    """Whether a stream counts tokens without being asked."""
    has_extras: bool = False
    """Whether answers have a place for `nvext`."""


CHAT = Surface("chat_completions", "Chat", "chatcmpl-{}".format, ChatChunks, chat_body, has_extras=True)
COMPLETIONS = Surface(
    "completions", "Completions", "cmpl-{}".format, CompletionChunks, completion_body, has_extras=True
)


class Pipeline:
    """All requests of one frontend."""

    def __init__(
        self,
        models: Models,
        metrics: FrontendMetrics,
        migration: MigrationPolicy | None = None,
        trace: RequestTrace | None = None,
        answers: AnswerOptions | None = None,
    ) -> None:
        answers = answers or AnswerOptions()
        self._chat = replace(
            CHAT, chunks=answers.chunks, body=partial(chat_body, reasoning_field=answers.reasoning_field)
        )
        self._models = models
        self._trace = trace
        self._migration = migration or MigrationPolicy()
        self._metrics = metrics
        self._tracer = tracing.tracer()
        self.tasks = TaskOwner("pipeline")
        self._flusher = Flusher(asyncio.get_running_loop())
        self._answers: set[BaseAnswer] = set()
        self._ignore_unsupported = setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool)
        self._always_usage = setting("DYN_ENABLE_FORCE_INCLUDE_USAGE", False, read_bool)
        self._takes_nvext = not setting("DYN_DISABLE_FRONTEND_NVEXT", False, read_bool)
        self.is_draining = False
        self._quiet = asyncio.Event()

    @property
    def metrics(self) -> FrontendMetrics:
        """What is counted of them."""
        return self._metrics

    @property
    def inflight(self) -> int:
        """Requests that are being answered."""
        return len(self._answers)

    # The routes' handlers: called on the loop with a whole request.

    def handle_chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        self.start(exchange, self._chat, self.chat(exchange))

    def handle_completion(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        self.start(exchange, COMPLETIONS, self.complete(exchange))

    # The main path.

    async def chat(self, exchange: Exchange) -> None:
        """A conversation's next turn."""
        request = decode_chat(bytes(exchange.body), ignore_unsupported=self._ignore_unsupported)
        surface = self._chat
        if request.service_tier is not None:
            surface = replace(
                surface,
                chunks=partial(surface.chunks, service_tier=SERVICE_TIER),
                body=partial(surface.body, service_tier=SERVICE_TIER),
            )
        await self.converse(exchange, request, surface)

    async def converse(self, exchange: Exchange, request: ChatCompletionRequest, surface: Surface) -> None:
        """A conversation's next turn, whatever the client's request and its answer look like."""
        self._extend(exchange, request)
        model = self._models.find(request.model, surface.model_type)
        with self._open(exchange, request, model, surface) as answer:
            model.admit()
            if isinstance(answer, TextAnswer):
                await answer.forward(trace_headers(exchange), metadata_of(exchange), chosen_worker(request, model))
                return
            prepared = await model.preprocessor.chat_async(request)
            if model.kv is not None and prepared.multi_modal_data is not msgspec.UNSET:
                images = model.preprocessor.images
                if images is not None:
                    await images.add(prepared, model.kv.config.block_size)
            self._place(exchange, model, request, [prepared])
            self._annotate(answer, model, request, [prepared])
            reader = model.preprocessor.readers.of_chat(request, prepared)
            if not model.is_decode:  # Its workers compute no prompts.
                answer.speculation = speculation_of(model, request, reader)
            await self._dispatch(model, [prepared], answer, reader)

    async def complete(self, exchange: Exchange) -> None:
        """The continuation of one or several prompts."""
        request = decode_completion(bytes(exchange.body), ignore_unsupported=self._ignore_unsupported)
        self._extend(exchange, request)
        model = self._models.find(request.model, COMPLETIONS.model_type)
        with self._open(exchange, request, model, COMPLETIONS) as answer:
            model.admit()
            if isinstance(answer, TextAnswer):
                await answer.forward(trace_headers(exchange), metadata_of(exchange), chosen_worker(request, model))
                return
            prepared = await model.preprocessor.completion_async(request)
            self._place(exchange, model, request, prepared)
            self._annotate(answer, model, request, prepared)
            if isinstance(answer, UnaryAnswer):
                answer.finish = finisher_of(request)
            echoes = [echo_of(model, request, place, one) for place, one in enumerate(prepared)]
            await self._dispatch(model, prepared, answer, echoes=echoes)

    def _extend(self, exchange: Exchange, request: ChatCompletionRequest | CompletionRequest) -> None:
        """What the headers say, and what this frontend lets requests say, of their way."""
        if self._takes_nvext:
            request.nvext = with_headers(request.nvext, exchange.headers)
        elif request.nvext is not None:
            request.nvext = NvExt(cache_salt=request.nvext.cache_salt)

    def _place(
        self,
        exchange: Exchange,
        model: ServedModel,
        request: ChatCompletionRequest | CompletionRequest,
        prepared: Sequence[PreprocessedRequest],
    ) -> None:
        """The worker that the request names, which must be one, and the agent's session that it belongs to."""
        chosen_worker(request, model)
        context = agent_context(exchange.headers, trigger_of(request))
        if context is not None:
            for one in prepared:
                one.agent_context = context
                one.image_cache_scope = context["session_id"]

    def _open(
        self,
        exchange: Exchange,
        request: ChatCompletionRequest | CompletionRequest,
        model: ServedModel,
        surface: Surface,
    ) -> "Open":
        """The answer to a request that was read: its accounts begin, and it ends whatever happens."""
        record = self._record(exchange, surface.endpoint, model, stream=bool(request.stream))
        response_id, created = surface.response_id(record.request_id), int(time.time())
        extras = extras_of(request.nvext, record) if surface.has_extras else None
        answer: BaseAnswer
        if model.takes_text:
            answer = TextAnswer(exchange, record, self._closed, model=model, name=model.name, tasks=self.tasks)
        elif request.stream:
            options = request.stream_options
            answer = StreamAnswer(
                exchange,
                record,
                self._closed,
                self._retry,
                chunks=surface.chunks(response_id, model.name, created),
                flusher=self._flusher,
                usage=surface.always_usage
                or self._always_usage
                or (options is not None and bool(options.include_usage)),
                running_usage=options is not None and bool(options.continuous_usage_stats),
                extras=extras,
            )
        else:
            body = partial(surface.body, response_id, model.name, created)
            answer = UnaryAnswer(exchange, record, self._closed, self._retry, body, extras)
        self._answers.add(answer)
        if self._trace is not None:
            self._trace.begin(answer, model.card.kv_cache_block_size)
        return Open(answer)

    def _record(self, exchange: Exchange, endpoint: str, model: ServedModel, *, stream: bool) -> RequestRecord:
        """The accounts of a request begin. Raises `NotFound` for a model that is not this caller's."""
        if exchange.account is not None:
            exchange.account.require(model.name)
        request_id = identify(exchange)
        record = RequestRecord(
            self._metrics,
            endpoint,
            model.name,
            stream=stream,
            started_s=time.perf_counter(),
            request_id=request_id,
        )
        if self._tracer is not None:
            begin_span(self._tracer, exchange, record)
        record.scope = (request_id, trace_headers(exchange), "http-request", "")
        current_request.set(record.scope)
        return record

    def adopt(
        self,
        exchange: Exchange,
        endpoint: str,
        model: ServedModel,
        make: Callable[[Exchange, RequestRecord, Closed], Made],
        *,
        stream: bool,
    ) -> Made:
        """An answer of whatever kind: its accounts begin, and it ends with the others. Raises `NotFound`."""
        answer = make(exchange, self._record(exchange, endpoint, model, stream=stream), self._closed)
        self._answers.add(answer)
        if self._trace is not None:
            self._trace.begin(answer, model.card.kv_cache_block_size)
        return answer

    async def relay(
        self,
        exchange: Exchange,
        endpoint: str,
        model: ServedModel,
        make: Callable[[str], bytes | PreprocessedRequest],
        form: Form,
        *,
        stream: bool = False,
        on_success: OnSuccess | None = None,
        tokens: PreprocessedRequest | None = None,
    ) -> None:
        """A request that a worker takes as `make` writes it, given the request's id, and whose answer has that form.

        `tokens` is what a KV router is told of one that is written otherwise than in tokens.
        """

        def made(_: Exchange, record: RequestRecord, closed: Closed) -> RelayAnswer:
            written = make(record.request_id)
            body, prompt = (b"", written) if isinstance(written, PreprocessedRequest) else (written, tokens)
            if prompt is not None and self._takes_nvext:
                prompt = headed(prompt, exchange.headers)
            return RelayAnswer(
                exchange, record, closed,
                model=model, tasks=self.tasks, request=body, form=form, on_success=on_success,
                placement=None if prompt is None else Placement(model, prompt, body),
            )  # fmt: skip

        answer = self.adopt(exchange, endpoint, model, made, stream=stream)
        with Open(answer):
            model.admit()
            await answer.forward(trace_headers(exchange), metadata_of(exchange))

    async def _dispatch(
        self,
        model: ServedModel,
        prepared: Sequence[PreprocessedRequest],
        answer: BaseAnswer,
        reader: Reader | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        """Sends every engine request of an answer; choices are numbered across them."""
        answer.record.prepared_s = time.perf_counter()
        media = prepared[0].multi_modal_data
        if isinstance(media, dict):
            answer.record.count_media(media)
        first_index = 0
        headers, metadata = trace_headers(answer.exchange), metadata_of(answer.exchange)
        if reader is None and not answer.is_plain:
            reader = PLAIN
        table = model.table(
            skip_special_tokens=prepared[0].output_options.skip_special_tokens is not False,
            shown=frozenset() if reader is None else reader.shown,
        )
        keeps_ids = answer.extras is not None and answer.extras.wants_token_ids
        for place, one in enumerate(prepared):
            generation = Generation(one, table, answer, first_index, reader, keeps_ids=keeps_ids)
            first_index += len(generation.choices)
            answer.add(generation)
            if place < len(echoes):
                for choice in generation.choices:
                    choice.add(echoes[place])
        parts = list(enumerate(list(answer.generations)))
        if model.is_decode and len(parts) > 1:  # Each waits for its prefill: all at once.
            sends = [self._send(model, answer, one, place, headers, metadata) for place, one in parts]
            failed = [end for end in await asyncio.gather(*sends, return_exceptions=True) if end is not None]
            if failed:
                raise failed[0]
        else:
            for place, generation in parts:
                await self._send(model, answer, generation, place, headers, metadata)
        answer.record.sent_s = time.perf_counter()

    async def _send(
        self,
        model: ServedModel,
        answer: BaseAnswer,
        generation: Generation,
        place: int,
        headers: dict[str, str],
        metadata: dict[str, str],
    ) -> None:
        """Sends one engine request of an answer that is still wanted."""
        if answer.is_over:
            return
        part_id = answer.record.request_id if place == 0 else new_id()
        route: tracing.Span | None = None
        if self._tracer is not None:
            route = begin_route(self._tracer, answer, part_id)
            headers = {**headers, **route.headers()}
        dispatch = dispatch_of(
            model, generation, part_id, headers, metadata=metadata, policy=self._migration, metrics=self._metrics
        )
        if answer.speculation is not None and generation.heard is None and self._migration.limit == 0:
            generation.heard = []  # Nothing is moved after its first token: it is kept for the next turn.
        await dispatch.send()
        if place == 0 and answer.exchange.header(EXPLAIN) in YES:
            answer.exchange.header_bytes += explanation_of(generation)
        if generation.call is not None:
            answer.record.workers.append(generation.call.instance_id)
            if route is not None:
                route.set("worker_id", f"{generation.call.instance_id:x}")

    def _annotate(
        self,
        answer: BaseAnswer,
        model: ServedModel,
        request: ChatCompletionRequest | CompletionRequest,
        prepared: Sequence[PreprocessedRequest],
    ) -> None:
        """The events that `nvext.annotations` asks for go before the first chunk (serving-plane.md §1.5)."""
        wanted = request.nvext.annotations if request.nvext is not None else None
        if not wanted or not isinstance(answer, StreamAnswer):
            return
        known: dict[str, Callable[[], object]] = {
            "request_id": lambda: answer.record.request_id,
            "token_ids": lambda: prepared[0].token_ids,
            "formatted_prompt": lambda: model.preprocessor.formatted_prompt(request),
        }
        for name in wanted:
            if name in known:
                what = known[name]()
                value = json_encode(what if isinstance(what, str) else json_encode(what).decode())
                answer.preamble += b"event: %b\n: %b\n\n" % (name.encode(), value)

    # How requests begin and end.

    def start(self, exchange: Exchange, surface: Surface, work: Coroutine[Any, Any, None]) -> None:
        """Answers an exchange with `work`; what it raises is the answer too."""
        exchange.error_body = surface.error_body
        if self.is_draining:
            work.close()
            exchange.refuse(answer_to(EngineShutdown("the frontend is shutting down")))
            return
        self.tasks.start(self._guard(exchange, surface.endpoint, work, time.perf_counter()), "request")

    async def _guard(self, exchange: Exchange, endpoint: str, work: Coroutine[Any, Any, None], whole_s: float) -> None:
        """The request boundary: what nobody else answered is answered here. `whole_s` is when it had arrived."""
        self._metrics.queue.observe(time.perf_counter() - whole_s)
        try:
            await work
        except DynamoException as error:
            told = answer_to(error)
            self._metrics.count_end(endpoint, "", "unary", told.label)
            identities = scope_fields(("", trace_headers(exchange), "http-request", ""))
            logger.info("request refused", extra={"status": told.status, "error": told.message, **identities})
            if self._tracer is not None:
                span = self._tracer.start("http-request", trace_headers(exchange), endpoint=endpoint)
                span.end(error)
            exchange.refuse(told)
        except Exception as error:
            logger.exception("request failed")
            self._metrics.count_end(endpoint, "", "unary", "internal")
            exchange.refuse(answer_to(error))

    def _closed(self, answer: BaseAnswer, error_type: str, error: Exception | None) -> None:
        self._answers.discard(answer)
        if self.is_draining and not self._answers:
            self._quiet.set()
        for generation in answer.generations:
            if isinstance(generation.dispatch, Dispatch):
                prefill = generation.dispatch.prefill
                if prefill is not None:
                    answer.record.prefill = prefill.instance_id, prefill.done_s
                generation.dispatch.release()
        if answer.speculation is not None and not error_type and not self.is_draining:
            self.tasks.start(self._speculate(answer.speculation, answer.generations[0]), "speculation")
        usage = answer.usage()
        now_s = time.perf_counter()
        answer.record.close(error_type, usage, now_s)
        if answer.exchange.account is not None and usage is not None:
            answer.exchange.account.spend(usage.total_tokens)
        if self._trace is not None:
            self._trace.end(answer, error_type)
        if answer.record.span is not None:
            end_span(answer.record.span, answer, error, usage)
        level = logging.ERROR if error_type == "internal" else logging.INFO
        if logger.isEnabledFor(level):
            fields = answer.record.summary(error_type, usage, now_s)
            if answer.record.scope is not None:
                fields |= scope_fields(answer.record.scope)
            if error is not None:
                fields["error"] = repr(error)
            logger.log(level, "request completed", extra=fields)

    async def _speculate(self, speculation: Speculation, generation: Generation) -> None:
        """Has the next turn's prompt computed where its beginning already is; what cannot be is left."""
        with contextlib.suppress(DynamoException):
            ahead = await asyncio.to_thread(speculation.prompt, generation)
            if ahead is not None:
                await speculation.model.send(
                    msgpack_encode(ahead),
                    Unheard(),
                    request_id=new_id(),
                    instance_id=generation.worker_id,
                    headers={},
                    exclude=frozenset(),
                )

    def _retry(self, generation: Generation, error: Exception) -> bool:
        dispatch = generation.dispatch
        if not isinstance(dispatch, Dispatch) or not dispatch.may_repeat(error):
            return False
        generation.revive()
        self.tasks.start(dispatch.repeat(error), "retry")
        return True

    def abandon(self, silent_s: float) -> None:
        """Ends every answer whose worker has said nothing for that long."""
        now_s = time.perf_counter()
        for answer in list(self._answers):
            if now_s - answer.spoke_s(now_s) > silent_s:
                answer.fail(ResponseTimeout(f"no token for {silent_s:g} s"))

    def expire(self, longest_s: float) -> None:
        """Ends every answer that takes longer than that."""
        now_s = time.perf_counter()
        for answer in list(self._answers):
            if now_s - answer.record.started_s > longest_s:
                answer.fail(ResponseTimeout(f"no end after {longest_s:g} s"))

    def keep_alive(self, interval_s: float) -> None:
        """Writes a comment into every stream into which nothing was written for that long.

        One that has not begun begins with it: its status is then 200 whatever comes.
        """
        now_s = time.perf_counter()
        for answer in self._answers:
            record = answer.record
            written_s = max(record.last_s, record.started_s, record.commented_s)
            if record.request_type == "stream" and now_s - written_s >= interval_s:
                record.commented_s = now_s
                answer.exchange.write(COMMENT)

    async def drain(self, budget_s: float) -> None:
        """Refuses what comes, waits for what is under way, and ends the rest with a 503."""
        self.is_draining = True
        await asyncio.sleep(0)  # What came in this very turn has not begun its answer yet.
        if self._answers:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget_s):  # Before 3.12 `wait_for` may swallow a cancellation.
                    await self._quiet.wait()
        for answer in list(self._answers):
            answer.fail(EngineShutdown("the frontend is shutting down"))
        await self.tasks.cancel_and_wait(1.0)


class Open:
    """An open answer; an exception of the main path is its end."""

    def __init__(self, answer: BaseAnswer) -> None:
        self._answer = answer

    def __enter__(self) -> BaseAnswer:
        return self._answer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            if not isinstance(error, DynamoException):
                logger.error("request failed", exc_info=error)
            self._answer.fail(error)
            return True
        if error is not None:
            self._answer.fail(EngineShutdown("the frontend is shutting down"))
        return False


def identify(exchange: Exchange) -> str:
    """The request's id: the client's `x-dynamo-request-id` if it is a UUID, else a new one. `x-request-id` is echoed."""
    echoed = exchange.header(b"x-request-id")
    if echoed is not None:
        exchange.header_bytes += b"x-request-id: %b\r\n" % echoed
    chosen = exchange.header(b"x-dynamo-request-id")
    if chosen is not None:
        try:
            return str(uuid.UUID(chosen.decode("ascii")))
        except ValueError:
            logger.debug("x-dynamo-request-id is no UUID and was not used")
    return new_id()


def new_id() -> str:
    """A random UUID (version 4). It names a request and guards nothing, so no system call is spent on it."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def trace_headers(exchange: Exchange) -> dict[str, str]:
    """What of the client's headers travels to the worker."""
    return {name.decode("ascii"): value.decode("latin-1") for name, value in exchange.headers if name in TRACE_HEADERS}


def metadata_of(exchange: Exchange) -> dict[str, str]:
    """The context metadata of the worker's request: the client's headers `x-dynamo-meta-<key>`."""
    return {
        name[len(META_HEADER) :].decode("ascii"): value.decode("latin-1")
        for name, value in exchange.headers
        if name.startswith(META_HEADER)
    }


def begin_span(tracer: tracing.Tracer, exchange: Exchange, record: RequestRecord) -> None:
    """Begins the request's span; from here on its headers are those that continue it."""
    facts: dict[str, tracing.Value] = {
        "request_id": record.request_id,
        "model": record.model,
        "endpoint": record.endpoint,
    }
    span = record.span = tracer.start("http-request", trace_headers(exchange), **facts)
    mine = [(name.encode(), value.encode()) for name, value in span.headers().items()]
    exchange.headers = [pair for pair in exchange.headers if pair[0] not in SPAN_HEADERS] + mine


def end_span(span: tracing.Span, answer: BaseAnswer, error: Exception | None, usage: CompletionUsage | None) -> None:
    """The request's span is over, with what is known of its tokens, and so are its ways to workers."""
    for route in answer.record.routes:
        route.end(error)
    if usage is not None:
        span.set("input_tokens", usage.prompt_tokens)
        span.set("output_tokens", usage.completion_tokens)
    span.end(error)


def begin_route(tracer: tracing.Tracer, answer: BaseAnswer, request_id: str) -> tracing.Span:
    """Begins the span of a generation's way to a worker and back."""
    span = tracer.start("router.route_request", trace_headers(answer.exchange), request_id=request_id)
    answer.record.routes.append(span)
    return span


def chosen_worker(request: ChatCompletionRequest | CompletionRequest, model: ServedModel) -> int | None:
    """The worker that the request names, None for any. Raises `InvalidArgument` for one that the model has not."""
    chosen = request.nvext.backend_instance_id if request.nvext is not None else None
    if chosen is not None and chosen not in model.client.instance_ids():
        raise InvalidArgument(
            f"backend_instance_id {chosen} is no worker of model `{model.name}`", param="nvext.backend_instance_id"
        )
    return chosen


def another_surface(
    surface: Surface, request: ChatCompletionRequest | CompletionRequest, response_id: str, created: int
) -> dict[str, Any]:
    """What a text worker's answer needs where the endpoint is not chat's or completions' own."""
    if surface.endpoint in SHAPES:
        return {}
    asked = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
    return {
        "request": msgpack_encode(asked),
        "writer": TextWriter(
            surface.chunks(response_id, request.model, created),
            partial(surface.body, response_id, request.model, created),
        ),
    }


def finisher_of(request: CompletionRequest) -> Callable[[Sequence[Generation]], list[Choice]]:
    """What of everything that was generated for a text completion is shown."""
    count = request.n or 1

    def finish(generations: Sequence[Generation]) -> list[Choice]:
        shown = all_choices(generations)
        if (request.best_of or 1) > count:
            shown = [
                choice
                for place, generation in enumerate(generations)
                for choice in best_choices(generation.choices, count, place * count)
            ]
        for choice in shown:
            if request.logprobs is None:
                choice.entries = None
        if request.echo and request.logprobs is not None:
            for generation in generations:
                before = generation.prompt_entries()
                for choice in generation.choices:
                    choice.entries = [*before, *(choice.entries or ())]
        return shown

    return finish


def echo_of(model: ServedModel, request: CompletionRequest, place: int, prepared: PreprocessedRequest) -> str:
    """The prompt as `echo` repeats it: the text given, or the tokens' text."""
    if not request.echo:
        return ""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    given = prompt[place] if prompt is not None and place < len(prompt) else None
    return given if isinstance(given, str) else model.preprocessor.tokenizer.decode(prepared.token_ids)
