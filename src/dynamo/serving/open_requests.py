"""Open requests: start, end and shutdown of the requests in progress."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.core import tracing
from dynamo.core.boundaries import ErrorBoundary, logged
from dynamo.core.codec import encode_client_json
from dynamo.core.errors import DynamoException, EngineShutdown, ResponseTimeout
from dynamo.core.logging import current_request, lifecycle, log_fields, scope_fields
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.answers import BaseAnswer, Closed
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.forwarded_request import ForwardedRequest
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch
from dynamo.serving.next_turn_prefill import NextTurnPrefill, NullReceiver, pinned
from dynamo.serving.recent_requests import RecentRequests, facts_of
from dynamo.serving.request_facts import RequestFacts
from dynamo.serving.request_headers import identify, metadata_of, new_id, new_traceparent, trace_headers
from dynamo.serving.request_state import SPAN, RequestState
from dynamo.serving.response_stream import IncomingRequest
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.serving.request_trace.trace import RequestTrace

logger = logging.getLogger(__name__)

Made = TypeVar("Made", bound=BaseAnswer)
Request = TypeVar("Request", bound=IncomingRequest)


class OpenRequests:
    """Requests in progress of one frontend."""

    def __init__(self, metrics: FrontendMetrics, trace: "RequestTrace | None") -> None:
        self.metrics = metrics
        """Metrics of the requests."""
        self.tasks = TaskOwner("pipeline")
        self.is_draining = False
        self.recent = RecentRequests()
        """The last requests that ended."""
        self._trace = trace
        self._tracer = tracing.tracer()
        self._answers: set[BaseAnswer] = set()
        self._quiet = asyncio.Event()

    def in_flight(self) -> list[RequestFacts]:
        """Return the facts of the requests in progress, in no order."""
        return [facts_of(answer) for answer in self._answers]

    @property
    def inflight(self) -> int:
        """Number of requests in progress."""
        return len(self._answers)

    def start(self, exchange: IncomingRequest, surface: Surface, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`, which writes the response; an exception it raises becomes the error response."""
        if exchange.error_body is not ErrorAnswer.flat_body:  # A service with flat errors keeps that form.
            exchange.error_body = surface.error_body
        if self.is_draining:
            work.close()
            exchange.refuse(answer_to(EngineShutdown("the frontend is shutting down")))
            return
        self.tasks.start(self._guard(exchange, surface.endpoint, work, time.perf_counter()), "request")

    async def _guard(
        self, exchange: IncomingRequest, endpoint: str, work: Coroutine[Any, Any, None], whole_s: float
    ) -> None:
        """Turn unhandled exceptions into error responses (request boundary). `whole_s`: arrival time of the whole request."""
        self.metrics.queue.observe(time.perf_counter() - whole_s)
        try:
            await work
        except DynamoException as error:
            response = answer_to(error)
            self.metrics.count_end(endpoint, "", "unary", response.label)
            self.recent.refused(endpoint, response.label, response.message, whole_s)
            identities = scope_fields(("", trace_headers(exchange), SPAN, ""))
            logger.info("request refused", extra={"status": response.status, "error": response.message, **identities})
            if self._tracer is not None:
                span = self._tracer.start(SPAN, trace_headers(exchange), endpoint=endpoint)
                span.end(error)
            exchange.refuse(response)
            if lifecycle.isEnabledFor(logging.INFO):
                self._log_refused(exchange, endpoint, response, whole_s, {"request_id": new_id(), **identities})
        except Exception as error:  # The request boundary: the client gets an error response, whatever failed.
            logger.exception("request failed")
            self.metrics.count_end(endpoint, "", "unary", "internal")
            exchange.refuse(answer_to(error))
        finally:
            exchange.drop_body()  # A response may take minutes and does not need the body any more.

    @staticmethod
    def _log_refused(
        exchange: IncomingRequest, endpoint: str, response: ErrorAnswer, whole_s: float, identities: dict[str, str]
    ) -> None:
        """Log every step of a request that was refused before its response was created."""
        elapsed_ms = round((time.perf_counter() - whole_s) * 1e3)
        failed = {"error_type": response.label, "error_detail": response.message, "elapsed_ms": elapsed_ms}
        lifecycle.info("request received", extra={"endpoint": endpoint, **identities})
        lifecycle.error("request completed", extra={"endpoint": endpoint, "status": "error", **failed, **identities})
        sent = {"status": str(exchange.status), "latency_ms": elapsed_ms}
        lifecycle.error("http response sent", extra={**sent, **identities})

    def adopt(
        self,
        exchange: Request,
        endpoint: str,
        model: ServedModel,
        make: Callable[[Request, RequestState, Closed], Made],
        *,
        stream: bool,
    ) -> Made:
        """Count a request and create its response, which closes the request's metrics when it ends.

        Raise `NotFound` for a model that the caller may not use. After an exception nothing is counted.
        """
        if exchange.account is not None:
            exchange.account.require(model.name)
        request_id, headers = identify(exchange), trace_headers(exchange)
        is_logged = lifecycle.isEnabledFor(logging.INFO)
        if is_logged and self._tracer is None:
            headers.setdefault("traceparent", new_traceparent())
        with contextlib.ExitStack() as undo:
            state = RequestState(
                self.metrics,
                endpoint,
                model.name,
                stream=stream,
                started_s=time.perf_counter(),
                request_id=request_id,
                headers=headers,
                metadata=metadata_of(exchange.headers),
            )
            undo.callback(state.discard)
            if self._tracer is not None:
                state.begin_span(self._tracer)
            current_request.set(state.scope)
            answer = make(exchange, state, self._closed)
            undo.pop_all()
        self._answers.add(answer)
        if is_logged:
            received = {"endpoint": endpoint, "model": model.name, "request_type": state.request_type}
            lifecycle.info("request received", extra=received | scope_fields(state.scope))
        if self._trace is not None:
            with self._observing(answer):
                self._trace.begin(answer, model.card.kv_cache_block_size)
        return answer

    def _observing(self, answer: BaseAnswer) -> ErrorBoundary:
        """Log exceptions of the block: a request does not depend on its trace."""
        return logged(logger, "request trace of %s failed", answer.state.request_id)

    def _closed(self, answer: BaseAnswer, error_type: str, error: Exception | None) -> None:
        """Release the workers of a finished response, close its metrics, and report it."""
        self._answers.discard(answer)
        if self.is_draining and not self._answers:
            self._quiet.set()
        usage, now_s = None, time.perf_counter()
        with logged(logger, "failed to release the workers of request %s", answer.state.request_id):
            self._release(answer)
            usage = answer.usage()
        answer.state.close(error_type, usage, now_s)
        if answer.exchange.account is not None and usage is not None:
            answer.exchange.account.spend(usage.total_tokens)
        if answer.next_turn_prefill is not None and not error_type and not self.is_draining:
            self.tasks.start(
                self._prefill_next_turn(answer.next_turn_prefill, answer.generations[0]), "next turn prefill"
            )
        self._report(answer, error_type, error, usage, now_s)
        if answer.next_turn_prefill is None:
            answer.drop_generations()

    @staticmethod
    def _release(answer: BaseAnswer) -> None:
        """Release the workers of a response in the routers that count them."""
        for generation in answer.generations:
            if isinstance(generation.dispatch, Dispatch):
                prefill = generation.dispatch.prefill
                if prefill is not None:
                    answer.state.prefilled_by(prefill)
                generation.dispatch.release()

    def _report(
        self,
        answer: BaseAnswer,
        error_type: str,
        error: Exception | None,
        usage: CompletionUsage | None,
        now_s: float,
    ) -> None:
        """Keep, trace and log a finished response."""
        with logged(logger, "failed to keep the record of request %s", answer.state.request_id):
            self.recent.ended(facts_of(answer, error_type, error, usage, now_s))
        if self._trace is not None:
            with self._observing(answer):
                self._trace.end(answer, error_type)
        if answer.state.span is not None:
            with self._observing(answer):
                answer.state.end_spans(error, usage)
        is_logged = lifecycle.isEnabledFor(logging.INFO)
        failed = is_logged and error_type not in ("", "cancelled")
        level = logging.ERROR if failed or error_type == "internal" else logging.INFO
        if is_logged and answer.exchange.status:
            status = answer.exchange.status
            sent = {"status": str(status), "latency_ms": round((now_s - answer.state.started_s) * 1e3)}
            lifecycle.log(
                logging.ERROR if status >= 400 else logging.INFO,
                "http response sent",
                extra=sent | scope_fields(answer.state.scope),
            )
        if logger.isEnabledFor(level):
            fields = answer.state.summary(error_type, usage, now_s) | scope_fields(answer.state.scope)
            if error is not None:
                fields |= {"error": repr(error), "error_detail": str(error)}
            log_fields(logger, level, "request completed", fields)

    async def _prefill_next_turn(self, next_turn_prefill: NextTurnPrefill, generation: Generation) -> None:
        """Prefill the next turn on the worker that has its prefix cached; failures are ignored."""
        with contextlib.suppress(DynamoException):
            ahead = await asyncio.to_thread(next_turn_prefill.prompt, generation)
            if ahead is None:
                return
            model = next_turn_prefill.model.current
            if model.is_decode:
                await ForwardedRequest(model, pinned(ahead, generation), NullReceiver(), self.tasks).send(
                    new_id(), {}, {}, self.metrics
                )
            else:
                await model.send(
                    encode_client_json(ahead),
                    NullReceiver(),
                    request_id=new_id(),
                    instance_id=generation.worker_id,
                    headers={},
                    exclude=frozenset(),
                )

    def abandon(self, silent_s: float) -> None:
        """End every response whose worker has sent nothing for `silent_s` seconds."""
        now_s = time.perf_counter()
        for answer in list(self._answers):
            if now_s - answer.spoke_s(now_s) > silent_s:
                answer.fail(ResponseTimeout(f"no token for {silent_s:g} s"))

    def expire(self, longest_s: float) -> None:
        """End every response that takes longer than `longest_s` seconds."""
        now_s = time.perf_counter()
        for answer in list(self._answers):
            if now_s - answer.state.started_s > longest_s:
                answer.fail(ResponseTimeout(f"no end after {longest_s:g} s"))

    def commit(self, wait_s: float) -> None:
        """Send the status of every stream whose worker has had the request for `wait_s` seconds without an event.

        An error that follows is an event of the stream.
        """
        latest_s = time.perf_counter() - wait_s
        for answer in self._answers:
            state = answer.state
            if not state.last_s and 0 < state.sent_s <= latest_s and state.request_type == "stream":
                answer.exchange.begin()

    def keep_alive(self, interval_s: float) -> None:
        """Write a comment to every stream that has been idle for `interval_s` seconds.

        A stream that has not begun begins with it: its status is then 200 whatever follows.
        """
        now_s = time.perf_counter()
        for answer in self._answers:
            state = answer.state
            written_s = max(state.last_s, state.started_s, state.commented_s)
            if state.request_type == "stream" and now_s - written_s >= interval_s:
                state.commented(now_s)
                answer.exchange.comment()

    async def drain(self, budget_s: float) -> None:
        """Refuse new requests, wait for those in progress, and end the rest with status 503."""
        self.is_draining = True
        await asyncio.sleep(0)  # Requests received in this loop tick have not created their response yet.
        if self._answers:
            self._quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(budget_s):  # Before 3.12 `wait_for` may swallow a cancellation.
                    await self._quiet.wait()
        for answer in list(self._answers):
            answer.fail(EngineShutdown("the frontend is shutting down"))
        await self.tasks.cancel_and_wait(1.0)


class Open:
    """Context manager that ends the response with an exception of the block."""

    def __init__(self, answer: BaseAnswer) -> None:
        self._answer = answer

    def __enter__(self) -> BaseAnswer:
        return self._answer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._answer.fail(error)
            return True
        if error is not None:
            self._answer.fail(EngineShutdown("the frontend is shutting down"))
        return False
