"""Migration: a generation whose worker fails goes on elsewhere, with the tokens it has (serving-plane.md §6.1).

Before the first token a request is simply sent again. After it, and only with `--migration-limit`, the next worker
gets the prompt and every token received so far as its prompt, and budgets reduced by them; the client's stream goes on
without a seam. A request whose state does not follow from its tokens is not migrated (`obstacle_of`).

Who failed a request is not asked again for it while somebody else is left. Where nobody is, one whose connection broke
is asked again after a moment: a network that hiccups must not cost the streams of a model with a single worker.
"""

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

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
from dynamo.kv_router.router import Decision
from dynamo.protocols.engine import RESUMED, PreprocessedRequest, Resumed, Routing
from dynamo.routing.kv_push_router import KvPushRouter
from dynamo.routing.session_affinity import SessionAffinity
from dynamo.serving.generation import Sent
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.prefill_phase import PrefillLeg
from dynamo.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

AGAIN_FIRST_S, AGAIN_MAX_S = 0.1, 1.0
"""Before a worker that failed is asked again: long enough for a connection to settle, too short to be felt."""

FIRST_SENDS_MAX = 4
"""Workers that a request without a token is offered to before its error is the client's; more would only delay it."""


@dataclass(frozen=True, slots=True)
class MigrationPolicy:
    """`--migration-limit` and `--migration-max-seq-len`."""

    limit: int = 0
    """How often a stream that has begun may move; 0 is never."""
    tokens_max: int | None = None
    """The longest prompt and output together that is still moved."""


def obstacle_of(request: PreprocessedRequest, *, resumes_sampling: bool) -> str | None:
    """Return the parameter whose state does not follow from a request's tokens, None where there is none.

    Engines count the penalties of output tokens only, and draw one random number per output token: where the output so
    far is part of the prompt, both start again, unless the engine `resumes_sampling`.
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


def resumed(request: PreprocessedRequest, heard: list[int], thinking_tokens: int = 0) -> PreprocessedRequest | None:
    """Return the request that continues after `heard`, of which so many tokens were thoughts.

    None when the budget is spent and only the end was missing.
    """
    stop = request.stop_conditions
    left = None if stop.max_tokens is None else stop.max_tokens - len(heard)
    if left is not None and left <= 0:
        return None
    least = None if stop.min_tokens is None else max(0, stop.min_tokens - len(heard))
    thoughts = stop.max_thinking_tokens
    spent = 0 if thoughts is None else min(thinking_tokens, thoughts)
    again = msgspec.structs.replace(
        request,
        token_ids=request.token_ids + heard,
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
        again.extra_args = {**extra, RESUMED: msgspec.to_builtins(Resumed(len(heard), spent))}
    return again


def telling(error: Exception, last: Exception) -> Exception:
    """Which of two errors says more: what broke a request, or why it could not go elsewhere.

    That nobody else is there says nothing of the failure.
    """
    return error if type(last) is WorkerUnavailable else last


class Dispatch:
    """One generation's way to a worker, and to the next one if that worker fails."""

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
        """As it is sent: after a move, with what was heard so far."""
        self._body = b""
        """That request, encoded when it is chosen who is asked."""
        self._booked: KvPushRouter | None = None
        """The router that counts it as a worker's."""
        self._kept: SessionAffinity | None = None
        """Where no such router is: what its session's binding is kept by."""
        self.decision: Decision | None = None
        """What it decided last."""
        self._clock = clock or SystemClock()
        self._tried: set[int] = set()
        """Who failed it, and is not asked while somebody else is left."""
        self._broken: set[int] = set()
        """Those of them whose connection broke: where nobody else is left, they are asked again."""
        self.prefill: PrefillLeg | None = None
        """Who computed the prompt, where that was not who answers (`llm.prefill_router`)."""
        self._backoff = Backoff(AGAIN_FIRST_S, AGAIN_MAX_S)
        self._tokens_before = 0
        """How many had come when a worker was last asked again."""
        self._repeats_left = FIRST_SENDS_MAX - 1
        self._moves_left = policy.limit
        self.obstacle: str | None = None
        """The parameter for which the stream cannot move once it has begun."""
        if policy.limit > 0:
            self.obstacle = obstacle_of(generation.request, resumes_sampling=model.resumes_sampling)
            if self.obstacle is None:
                generation.heard = []
        generation.dispatch = self

    async def send(self) -> None:
        """Sends it. Raises what the last worker tried answered."""
        tried = self._unwanted()
        while True:
            instance_id = await self._route(frozenset(tried))
            try:
                call = await self._model.send(
                    self._body,
                    self._generation,
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
            except BaseException:
                self.release()
                raise
        sessions = self._model.current.sessions
        if sessions is not None and sessions.sent(self._request, self._request_id, call.instance_id):
            self._kept = sessions
        if self._generation.is_over:  # Its client left while it was on its way.
            call.kill()
            self.release()
        else:
            self._generation.call = call

    async def _route(self, exclude: frozenset[int]) -> int | None:
        """Chooses, and counts how long that took."""
        metrics, began_s = self._metrics, time.perf_counter()
        metrics.routing.inc()
        try:
            return await self._choose(exclude)
        finally:
            metrics.routing.dec()
            metrics.route.observe(time.perf_counter() - began_s)

    async def _choose(self, exclude: frozenset[int]) -> int | None:
        """The worker that the request names, or that the KV router chooses; None where the client's mode decides."""
        self.release()
        request = self._leg()
        found = await self._model.choose(self._asked(), self._request_id, self._generation, exclude, self._metadata)
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

    def _leg(self) -> PreprocessedRequest:
        """What the worker is sent."""
        return self._request

    def _asked(self) -> PreprocessedRequest:
        """What a KV router is asked about it."""
        return self._leg()

    def _unwanted(self) -> set[int]:
        """Who is not sent it."""
        return set(self._tried)

    def release(self) -> None:
        """The worker that it was given to is rid of it."""
        booked, self._booked = self._booked, None
        if booked is not None:
            booked.release(self._request_id)
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.finish(self._request_id)

    @property
    def _chosen(self) -> int | None:
        """The worker that the request itself names."""
        routing = self._generation.request.routing
        return routing.backend_instance_id if routing is not None else None

    def can_move(self) -> bool:
        """Whether somebody else could take over from the worker it has now; nothing is counted."""
        generation = self._generation
        if generation.call is None or self._chosen is not None:
            return False
        if generation.tokens == 0:
            may_move = self._repeats_left > 0
        else:
            may_move = generation.heard is not None and self._moves_left > 0 and not self._is_too_long
        return may_move and self._model.has_other(frozenset(self._tried | {generation.call.instance_id}))

    @property
    def _is_too_long(self) -> bool:
        tokens_max, generation = self._policy.tokens_max, self._generation
        return tokens_max is not None and len(generation.request.token_ids) + len(generation.heard or ()) > tokens_max

    def refusal(self, error: Exception) -> CannotResume | None:
        """Return why a stream that broke does not move, where a parameter of its request is the reason."""
        if self.obstacle is None or self._generation.tokens == 0:
            return None
        if not (isinstance(error, DynamoException) and error.retry_elsewhere):
            return None
        logger.warning("request %s: stream cannot move: %s", self._request_id, self.obstacle)
        return CannotResume(f"The worker failed, and a stream with {self.obstacle} cannot continue on another worker")

    def may_repeat(self, error: Exception) -> bool:
        """Whether another worker may take over after `error`; a move that may is counted."""
        if not (isinstance(error, DynamoException) and error.retry_elsewhere):
            return False
        generation = self._generation
        name = self._model.name
        if generation.tokens == 0:
            if self._repeats_left <= 0:
                return False
            self._repeats_left -= 1
            self._metrics.migrations.labels(model=name, migration_type="new_request").inc()
            return True
        if generation.heard is None or self._moves_left <= 0:
            return False
        if self._is_too_long:
            self._metrics.migrations_too_long.labels(model=name).inc()
            return False
        self._moves_left -= 1
        self._repeats_left = FIRST_SENDS_MAX - 1
        self._metrics.migrations.labels(model=name, migration_type="ongoing_request").inc()
        return True

    async def repeat(self, error: Exception) -> None:
        """Sends it elsewhere after `error`, with what was heard so far."""
        generation = self._generation
        logger.warning("Stream disconnected, recreating stream: request=%s error=%s", self._request_id, error)
        started_s = time.perf_counter()
        self.release()
        if generation.failed_instance is not None:
            self._tried.add(generation.failed_instance)
            if isinstance(error, Disconnected | StreamIncomplete):
                self._broken.add(generation.failed_instance)
        outcome = "success"
        try:
            if generation.heard:
                again = resumed(generation.request, generation.heard, generation.thinking_tokens())
                if again is None:
                    generation.end_spent()
                    return
                self._request = again
            await self._send_on()
        except Exception as last:  # The request boundary: the request ends with every kind of error.
            outcome = "cancelled" if generation.is_over else "failure"
            logger.warning("Cannot recreate stream: request=%s error=%s", self._request_id, last)
            self._repeats_left = self._moves_left = 0  # Nobody is left who would answer.
            generation.broke(telling(error, last))
        finally:
            seconds = time.perf_counter() - started_s
            self._metrics.migration_duration.labels(model=self._model.name, outcome=outcome).observe(seconds)

    async def _send_on(self) -> None:
        """Sends it to somebody who has not failed it; where nobody is left, in a moment to whose connection broke."""
        try:
            await self.send()
        except WorkerUnavailable:
            if not self._broken or self._chosen is not None:
                raise
            if self._generation.tokens > self._tokens_before:
                self._backoff.reset()
            self._tokens_before = self._generation.tokens
            await self._clock.sleep(self._backoff.next(random.random()))
            if not self._generation.is_over:
                self._tried -= self._broken
                self._broken.clear()
                await self.send()
