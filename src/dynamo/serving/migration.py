"""Migration: retry of a request on another worker, with the tokens received so far.

Before the first token a request is simply sent again. After it, and only with `--migration-limit`, the next worker
receives the prompt and all tokens received so far as its prompt, and accordingly reduced token limits; the client's
stream continues without interruption. A request whose state does not follow from its tokens is not migrated
(`obstacle_of`).

`Attempts` has the rules of all retries. The loops that send a request again are here (generations) and in
`prefill_router` (prefill phases), `text_models` (relayed requests) and `grpc.calls` (tensors). The deadline of a request
is enforced for all of them by `OpenRequests.expire`, and its silence by `OpenRequests.abandon`.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from dynamo.core.backoff import Backoff
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import (
    CannotConnect,
    CannotResume,
    Disconnected,
    DynamoException,
    StreamIncomplete,
    WorkerUnavailable,
)
from dynamo.protocols.engine import RESUMED, PreprocessedRequest, Resumed, Routing
from dynamo.runtime.request_plane.base import Call, Item, Receiver
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.request_facts import Move
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision
    from dynamo.routing.kv_push_router import KvPushRouter
    from dynamo.routing.session_affinity import SessionAffinity

logger = logging.getLogger(__name__)

SENDS_MAX = 4
"""Maximum number of workers tried for a request without a token; more would only delay the error response."""

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0
"""Delay in seconds before a failed worker is retried: long enough for a connection to settle, too short to notice."""


def is_retryable(error: Exception) -> bool:
    """Return whether another worker may succeed after this error."""
    return isinstance(error, DynamoException) and error.retry_elsewhere


def connection_broke(error: Exception) -> bool:
    """Return whether the connection to a worker broke, rather than the worker: it may be tried again later."""
    return isinstance(error, Disconnected | StreamIncomplete)


def more_informative(error: Exception, last: Exception) -> Exception:
    """Return the failure of the request, or the failure of its retry if that describes more than a lack of workers."""
    return error if type(last) is WorkerUnavailable else last


class Attempts:
    """Attempts of one request.

    A worker that failed the request is excluded while another one is left. If none is left, a worker whose connection
    broke is admitted again after a delay: a short network failure must not end the streams of a model with a single worker.
    """

    __slots__ = ("_backoff", "_disconnected", "_migrations_left", "_sends_left", "_tokens_at_readmission", "excluded")

    def __init__(self, migrations_max: int = 0) -> None:
        """`migrations_max`: how often the request may be sent again after its first token."""
        self.excluded: set[int] = set()
        """Workers that failed the request."""
        self._disconnected: set[int] = set()
        self._sends_left = SENDS_MAX - 1
        self._migrations_left = migrations_max
        self._backoff: Backoff | None = None
        self._tokens_at_readmission = 0

    @property
    def may_send_again(self) -> bool:
        """Whether a request without a token may be sent to another worker."""
        return self._sends_left > 0

    @property
    def may_migrate(self) -> bool:
        """Whether a stream that has begun may continue on another worker."""
        return self._migrations_left > 0

    def count_send(self) -> None:
        """Count a repeated send of a request without a token."""
        self._sends_left -= 1

    def count_migration(self) -> None:
        """Count a migration of a stream, whose next worker may fail before its first token as often as the first one."""
        self._migrations_left -= 1
        self._sends_left = SENDS_MAX - 1

    def end(self) -> None:
        """Allow no further attempt: no worker is left."""
        self._sends_left = self._migrations_left = 0

    def exclude(self, worker_id: int, *, may_recover: bool) -> None:
        """Exclude a worker that failed the request; `may_recover`: it may be admitted again."""
        self.excluded.add(worker_id)
        if may_recover:
            self._disconnected.add(worker_id)

    @property
    def can_readmit(self) -> bool:
        """Whether an excluded worker may be admitted again."""
        return bool(self._disconnected)

    def readmission_delay_s(self, tokens: int, fraction: float) -> float:
        """Return the delay before `readmit`, in seconds: it doubles until the request makes progress.

        `tokens` is the number of output tokens so far; `fraction` (0 to 1) chooses the jitter.
        """
        if self._backoff is None or tokens > self._tokens_at_readmission:
            self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        self._tokens_at_readmission = tokens
        return self._backoff.next(fraction)

    def readmit(self) -> None:
        """Admit the workers whose connection broke."""
        self.excluded -= self._disconnected
        self._disconnected.clear()


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """`--migration-limit` and `--migration-max-seq-len`."""

    limit: int = 0
    """Maximum number of migrations of a stream that has begun; 0 disables migration."""
    tokens_max: int | None = None
    """Maximum number of prompt and output tokens of a migrated stream."""


def obstacle_of(request: PreprocessedRequest, *, resumes_sampling: bool) -> str | None:
    """Return the parameter whose state does not follow from a request's tokens; None if there is none.

    Engines count penalties over output tokens only, and draw one random number per output token: if the output so far
    becomes part of the prompt, both restart, unless the engine `resumes_sampling`.
    """
    sampling, output = request.sampling_options, request.output_options
    own = {} if request.extra_args is msgspec.UNSET else request.extra_args.get("sampling_options") or {}
    is_sampled = sampling.temperature is None or sampling.temperature > 0
    lost = {
        "n": (sampling.n or 1) > 1,
        "best_of": (sampling.best_of or 1) > 1,
        "use_beam_search": bool(sampling.use_beam_search),
        "guided_decoding": sampling.guided_decoding is not None,
        "logprobs": output.logprobs is not None,
        "prompt_embeds": bool(request.prompt_embeds),
        "prompt_logprobs": output.prompt_logprobs is not None,
        "bad_words": bool(own.get("bad_words")),
        "presence_penalty": bool(sampling.presence_penalty) and not resumes_sampling,
        "frequency_penalty": bool(sampling.frequency_penalty) and not resumes_sampling,
        "seed": sampling.seed is not None and is_sampled and not resumes_sampling,
    }
    return next((name for name, is_lost in lost.items() if is_lost), None)


def resumed(
    request: PreprocessedRequest, received_ids: list[int], thinking_tokens: int = 0
) -> PreprocessedRequest | None:
    """Return the request that continues after the received tokens, of which `thinking_tokens` were reasoning.

    None if the token limit is reached and only the end was missing.
    """
    stop = request.stop_conditions
    left = None if stop.max_tokens is None else stop.max_tokens - len(received_ids)
    if left is not None and left <= 0:
        return None
    least = None if stop.min_tokens is None else max(0, stop.min_tokens - len(received_ids))
    thoughts = stop.max_thinking_tokens
    spent = 0 if thoughts is None else min(thinking_tokens, thoughts)
    again = msgspec.structs.replace(
        request,
        token_ids=request.token_ids + received_ids,
        stop_conditions=msgspec.structs.replace(
            stop,
            max_tokens=left,
            min_tokens=least,
            max_thinking_tokens=None if thoughts is None else thoughts - spent,
        ),
    )
    sampling = request.sampling_options
    if thoughts is not None or sampling.presence_penalty or sampling.frequency_penalty:
        extra = {} if request.extra_args is msgspec.UNSET else request.extra_args
        again.extra_args = {**extra, RESUMED: msgspec.to_builtins(Resumed(len(received_ids), spent))}
    return again


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
        found = await self._model.choose(
            self._routing_request(), self._request_id, self._generation, exclude, self._metadata
        )
        if found is None:
            self._body = msgpack_encode(request)
            return self._model.bound(request, exclude) if self._chosen is None else self._chosen
        served, decision = found
        self._booked = served.kv
        self.decision = decision
        routing = msgspec.structs.replace(request.routing or Routing(), dp_rank=decision.dp_rank)
        request = msgspec.structs.replace(request, routing=routing)
        self._body = msgpack_encode(request if served.kv is None else served.kv.hinted(request, decision))
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
        if generation.tokens == 0:
            may_move = self._attempts.may_send_again
        else:
            may_move = generation.received_ids is not None and self._attempts.may_migrate and not self._is_too_long
        return may_move and self._model.has_other(frozenset(self._attempts.excluded | {generation.call.instance_id}))

    @property
    def _is_too_long(self) -> bool:
        tokens_max, generation = self._policy.tokens_max, self._generation
        return (
            tokens_max is not None
            and len(generation.request.token_ids) + len(generation.received_ids or ()) > tokens_max
        )

    def refusal(self, error: Exception) -> CannotResume | None:
        """Return the error of a broken stream that cannot migrate because of a parameter of its request."""
        if self.obstacle is None or self._generation.tokens == 0 or not is_retryable(error):
            return None
        logger.warning("request %s: stream cannot move: %s", self._request_id, self.obstacle)
        return CannotResume(f"The worker failed, and a stream with {self.obstacle} cannot continue on another worker")

    def may_repeat(self, error: Exception) -> bool:
        """Return whether another worker may take over after `error`; count a permitted migration."""
        if not is_retryable(error):
            return False
        generation, attempts = self._generation, self._attempts
        name = self._model.name
        if generation.tokens == 0:
            if not attempts.may_send_again:
                return False
            attempts.count_send()
            self._metrics.migrations.labels(model=name, migration_type="new_request").inc()
            return True
        if generation.received_ids is None or not attempts.may_migrate:
            return False
        if self._is_too_long:
            self._metrics.migrations_too_long.labels(model=name).inc()
            return False
        attempts.count_migration()
        self._metrics.migrations.labels(model=name, migration_type="ongoing_request").inc()
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
