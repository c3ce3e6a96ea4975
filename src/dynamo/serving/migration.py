"""Migration: dispatch of a generation to a worker, and to another one if that worker fails.

Before the first token a request is simply sent again, and so is one of which the client has seen nothing because its
response is not streamed. After the first token, and only with `--migration-limit`, the client's stream continues on another
worker without interruption (`resumed_request`). `attempts` has the rules of all retries.

The deadline of a request is enforced by `OpenRequests.expire`, and its silence by `OpenRequests.abandon`.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from dynamo.core.amortized import SingleTurns
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import encode_client_json
from dynamo.core.errors import CannotConnect, CannotResume, WorkerUnavailable
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.runtime.request_plane.base import Call, Item, Receiver
from dynamo.serving.attempts import Attempts, connection_broke, is_retryable, more_informative
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.request_facts import Move
from dynamo.serving.resumed_request import obstacle_of, resumed
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision
    from dynamo.routing.kv_push_router import KvPushRouter
    from dynamo.routing.session_affinity import SessionAffinity

logger = logging.getLogger(__name__)

LONG_TOKENS = 1 << 17
"""Tokens of a prompt whose hashes, and then whose message, take a millisecond or more: up to seven for a million tokens."""
_LONG_TURNS = SingleTurns()


class MigrationPolicy(Struct, frozen=True):
    """`--migration-limit` and `--migration-max-seq-len`."""

    limit: int = 0
    """Maximum number of migrations of a stream that has begun; 0 disables migration."""
    tokens_max: int | None = None
    """Maximum number of prompt and output tokens of a migrated stream."""


class Sent(Receiver, Protocol):
    """Request that is sent to workers and may be retried on another one."""

    request: PreprocessedRequest
    tokens: int
    """Output tokens received."""
    is_over: bool
    """Whether the result is no longer needed."""
    call: Call | None
    received_ids: list[int] | None
    """All tokens so far, if the request may be resumed on another worker after its first token; else None."""
    failed_instance: int | None
    """Worker on which it failed."""

    @property
    def can_start_over(self) -> bool:
        """Whether the output so far may be discarded, because the client has not seen any of it."""

    def start_over(self) -> None:
        """Discard the output so far."""

    def attach(self, call: Call) -> None:
        """Set the active request to a worker."""

    def keep_ids(self) -> None:
        """Keep all tokens from now on."""

    def excuse_worker(self) -> None:
        """Do not blame the worker of the last failure, which another one caused."""

    def leaves_silent_worker(self) -> bool:
        """Return whether to leave the worker, which is unresponsive."""

    def thinking_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""

    def end_spent(self) -> None:
        """End a request that has received all its tokens and lacks only its end."""

    def broke(self, error: Exception) -> None:
        """End with the error: no other worker can take the request."""


class FirstOutput:
    """Receiver of a request that was sent again: reports its first output, and passes everything on."""

    __slots__ = ("_on_first", "receiver")

    def __init__(self, receiver: "Sent", on_first: Callable[[], None]) -> None:
        self.receiver = receiver
        self._on_first: Callable[[], None] | None = on_first

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""
        self._report()
        self.receiver.on_token(token_id)

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""
        self._report()
        self.receiver.on_item(item)

    def on_end(self) -> None:
        """See `Receiver`."""
        self.receiver.on_end()

    def on_error(self, error: Exception) -> None:
        """See `Receiver`."""
        self.receiver.on_error(error)

    def leaves_silent_worker(self) -> bool:
        """See `MovableReceiver`."""
        return self.receiver.leaves_silent_worker()

    def _report(self) -> None:
        report, self._on_first = self._on_first, None
        if report is not None:
            report()


class Dispatch:
    """Dispatch of one generation to a worker, and to another one if that worker fails."""

    def __init__(
        self,
        model: ServedModel,
        generation: Sent,
        request_id: str,
        headers: Mapping[str, str],
        *,
        metadata: Mapping[str, str] | None = None,
        policy: MigrationPolicy,
        metrics: FrontendMetrics,
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._generation = generation
        self._request_id = request_id
        self._headers = headers
        self._metadata = metadata or {}
        self._policy = policy
        self._metrics = metrics
        self._request = generation.request
        """Request as it is sent: after a migration, with the tokens received so far."""
        self._body = b""
        """Encoded `_request`, set when the worker is chosen."""
        self._booked: KvPushRouter | None = None
        """KV router that counts the request, if any."""
        self._kept: SessionAffinity | None = None
        """Session affinity that keeps the request's session bound, if there is no KV router."""
        self.decision: Decision | None = None
        """Latest decision of the KV router."""
        self.moves: tuple[Move, ...] = ()
        """Failures after which the request was sent to another worker, oldest first; bounded by the attempts."""
        self.route_s = (0.0, 0.0)
        """Begin and end of the latest choice of a worker; 0 before."""
        self.requests_ahead = 0
        """Requests of this frontend that were in flight to the worker when it was chosen."""
        self._clock = clock or SystemClock()
        self._attempts = Attempts(policy.limit)
        self.prefill: PrefillPhase | None = None
        """Prefill phase, if the prompt was computed by another worker (`prefill_router`)."""
        self.obstacle: str | None = None
        """Parameter that prevents migration of the stream once it has begun."""
        if policy.limit > 0:
            self.obstacle = obstacle_of(generation.request, resumes_sampling=model.resumes_sampling)
            if self.obstacle is None:
                generation.keep_ids()

    phase = "aggregated"
    """Phase that the workers compute."""

    async def send(self) -> None:
        """Send the request. Raise the error of the last worker tried."""
        tried = self._excluded()
        while True:
            instance_id = await self._route(frozenset(tried))
            receiver = FirstOutput(self._generation, self._note_resumed) if self.moves else self._generation
            try:
                call = await self._model.send(
                    self._body,
                    receiver,
                    request_id=self._request_id,
                    instance_id=instance_id,
                    headers=self._headers,
                    metadata=self._metadata,
                    exclude=frozenset(tried),
                )
                break
            except CannotConnect:
                if self._chosen is not None or instance_id is None:
                    self.release()
                    raise
                tried.add(instance_id)
            except BaseException:  # Without a context manager: this runs for every request.
                self.release()
                raise
        current = self._model.current
        self.requests_ahead = max(0, current.inflight(call.instance_id) - 1)
        if current.routed is not None:
            current.routed.sent(len(self._request.token_ids))
        sessions = current.sessions
        if sessions is not None and sessions.sent(self._request, self._request_id, call.instance_id):
            self._kept = sessions
        if self._generation.is_over:  # The client disconnected during the send.
            call.kill()
            self.release()
        else:
            self._generation.attach(call)

    def _note_resumed(self) -> None:
        """Record the first output after the latest move."""
        self.moves = (*self.moves[:-1], self.moves[-1]._replace(resumed_s=time.perf_counter()))

    async def _route(self, exclude: frozenset[int]) -> int | None:
        """Choose a worker, and record how long that took."""
        metrics, began_s = self._metrics, time.perf_counter()
        choosing = metrics.phase(self.phase).route
        choosing.value += 1
        try:
            return await self._choose(exclude)
        finally:
            ended_s = time.perf_counter()
            self.route_s = began_s, ended_s
            choosing.value -= 1
            metrics.route.observe(ended_s - began_s)

    async def _choose(self, exclude: frozenset[int]) -> int | None:
        """Return the worker named by the request or chosen by the KV router; None if the client's mode chooses."""
        self.release()
        request = self._outgoing_request()
        is_long = len(request.token_ids) >= LONG_TOKENS
        if is_long:
            await _LONG_TURNS.take()
        found = await self._model.choose(
            self._routing_request(), self._request_id, self._generation, exclude, self._metadata
        )
        if found is None:
            self._body = encode_client_json(request)
            return self._model.bound(request, exclude) if self._chosen is None else self._chosen
        served, decision = found
        self._booked = served.kv
        self.decision = decision
        if is_long:
            await _LONG_TURNS.take()
        routing, dp_rank = request.routing, decision.dp_rank
        routing = Routing(dp_rank=dp_rank) if routing is None else msgspec.structs.replace(routing, dp_rank=dp_rank)
        request = msgspec.structs.replace(request, routing=routing)
        self._body = encode_client_json(request if served.kv is None else served.kv.hinted(request, decision))
        return decision.worker_id

    def _outgoing_request(self) -> PreprocessedRequest:
        """Return the request for the worker."""
        return self._request

    def _routing_request(self) -> PreprocessedRequest:
        """Return the request for the KV router."""
        return self._outgoing_request()

    def _excluded(self) -> set[int]:
        """Return the excluded workers."""
        return set(self._attempts.excluded)

    def release(self) -> None:
        """Release the request's worker in the routers that count it."""
        booked, self._booked = self._booked, None
        if booked is not None:
            booked.release(self._request_id)
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.finish(self._request_id)

    @property
    def _chosen(self) -> int | None:
        """Worker named by the request itself."""
        routing = self._generation.request.routing
        return routing.backend_instance_id if routing is not None else None

    def can_move(self) -> bool:
        """Return whether another worker could take over; nothing is counted."""
        generation = self._generation
        if generation.call is None or self._chosen is not None:
            return False
        may_move = self._attempts.may_send_again if generation.tokens == 0 else self._may_resume or self._may_start_over
        return may_move and self._model.has_other(frozenset(self._attempts.excluded | {generation.call.instance_id}))

    @property
    def _may_resume(self) -> bool:
        """Whether another worker may continue after the tokens received so far."""
        return self._generation.received_ids is not None and self._attempts.may_migrate and not self._is_too_long

    @property
    def _may_start_over(self) -> bool:
        """Whether another worker may compute the whole response, in spite of the tokens received so far."""
        return self._generation.can_start_over and self._attempts.may_send_again

    @property
    def _is_too_long(self) -> bool:
        tokens_max, generation = self._policy.tokens_max, self._generation
        return (
            tokens_max is not None
            and len(generation.request.token_ids) + len(generation.received_ids or ()) > tokens_max
        )

    def refusal(self, error: Exception) -> CannotResume | None:
        """Return the error of a broken stream that cannot migrate because of a parameter of its request."""
        if self.obstacle is None or self._generation.tokens == 0 or self._may_start_over or not is_retryable(error):
            return None
        logger.warning("request %s: stream cannot move: %s", self._request_id, self.obstacle)
        return CannotResume(f"The worker failed, and a stream with {self.obstacle} cannot continue on another worker")

    def may_repeat(self, error: Exception) -> bool:
        """Return whether another worker may take over after `error`; count a permitted migration."""
        if not is_retryable(error):
            return False
        generation, attempts = self._generation, self._attempts
        name = self._model.name
        if generation.tokens > 0:
            if generation.received_ids is not None and attempts.may_migrate and self._is_too_long:
                self._metrics.migrations_too_long.labels(model=name).inc()
            if self._may_resume:
                attempts.count_migration()
                self._metrics.migrations.labels(model=name, migration_type="ongoing_request").inc()
                return True
            if not self._may_start_over:
                return False
            generation.start_over()
        elif not attempts.may_send_again:
            return False
        attempts.count_send()
        self._metrics.migrations.labels(model=name, migration_type="new_request").inc()
        return True

    async def repeat(self, error: Exception, silent_s: float = 0.0) -> None:
        """Send the request to another worker after `error`, with the tokens received so far.

        `silent_s`: time of the last output by `time.perf_counter`; 0 without any, or where outputs are not timed.
        """
        generation = self._generation
        logger.warning("Stream disconnected, recreating stream: request=%s error=%s", self._request_id, error)
        started_s = time.perf_counter()
        move = Move(started_s, generation.failed_instance, str(error), generation.tokens, silent_s)
        self.moves = (*self.moves, move)
        self.release()
        if generation.failed_instance is not None:
            self._attempts.exclude(generation.failed_instance, may_recover=connection_broke(error))
        outcome = "success"
        try:
            if generation.received_ids:
                again = resumed(generation.request, generation.received_ids, generation.thinking_tokens())
                if again is None:
                    generation.end_spent()
                    return
                self._request = again
            else:
                self._request = generation.request
            await self._send_on()
        except Exception as last:  # noqa: BLE001 - request boundary: the request ends with every kind of error
            outcome = "cancelled" if generation.is_over else "failure"
            logger.warning("Cannot recreate stream: request=%s error=%s", self._request_id, last)
            self._attempts.end()
            generation.broke(more_informative(error, last))
        finally:
            seconds = time.perf_counter() - started_s
            self._metrics.migration_duration.labels(model=self._model.name, outcome=outcome).observe(seconds)

    async def _send_on(self) -> None:
        """Send to a worker that has not failed the request; if none is left, retry after a delay those that disconnected."""
        try:
            await self.send()
        except WorkerUnavailable:
            if not self._attempts.can_readmit or self._chosen is not None:
                raise
            await self._clock.sleep(self._attempts.readmission_delay_s(self._generation.tokens, random.random()))
            if self._generation.is_over:
                return
            try:
                await self.send()  # Workers that have not failed the request may have come back during the delay.
            except WorkerUnavailable:
                self._attempts.readmit()
                await self.send()
