"""Prefill router: dispatch of a request in a prefill phase and a decode phase (docs/disaggregation.md).

    choose a prefill worker ─▶ send it the prompt ─▶ its result ─▶ choose a decode worker ─▶ send it prompt and result
                          └─▶ if the decode worker can fetch the blocks directly, both are sent at once

A failure before the first output token repeats the prefill on another worker, or both phases. A stream that fails later
is migrated as others are (`migration`): prompt and output so far are prefilled again.
"""

import logging
import random
from functools import partial
from typing import Any

import msgspec

from dynamo.core.boundaries import Rollback
from dynamo.core.codec import encode_client_json
from dynamo.core.config import setting
from dynamo.core.errors import (
    Cancelled,
    CannotConnect,
    InvalidArgument,
    Overloaded,
    Unknown,
    WorkerUnavailable,
)
from dynamo.protocols.engine import BootstrapInfo, PrefillResult, PreprocessedRequest, Routing
from dynamo.routing.prefill_plan import decode_request, prefill_request, prefill_routing_request, whole
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.attempts import SENDS_MAX, Attempts, connection_broke, more_informative
from dynamo.serving.migration import Dispatch, Sent
from dynamo.serving.phase_routing import computes_locally, onward_costs, prefill_set_of, reach_of
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 300.0
"""Timeout of a prefill in seconds: longer than any prompt takes."""

LAST_WORDS_S = 1.0
"""Time in seconds for a prefill to end once its decode worker has responded: its last frame may be in transit."""

SEQUENTIAL_MODES = frozenset((RouterMode.POWER_OF_TWO, RouterMode.LEAST_LOADED))
"""Modes that count active requests, and would count wrongly if both phases were sent at once; as upstream."""


class DisaggregatedDispatch(Dispatch):
    """Dispatch of one generation to a prefill worker and a decode worker, and to others if one of them fails."""

    phase = "decode"

    def __init__(self, model: ServedModel, generation: Sent, request_id: str, *more: Any, **named: Any) -> None:
        super().__init__(model, generation, request_id, *more, **named)
        self._outgoing = self._request
        """Request of the decode phase."""
        self._constraints: dict[str, Any] | None = None
        """Routing constraints of the decode worker: those that can receive the KV blocks."""
        self._out_of_reach: frozenset[int] = frozenset()
        """Decode workers that cannot receive the blocks."""
        self._prefill_attempts = Attempts()
        self._tokens_before = 0
        """Output tokens at the time the phases were sent."""
        self._early: Exception | None = None
        """Failure of the prefill before the decode phase was sent."""
        self._blames_prefill = False
        self._timeout_s = setting("DYN_ROUTER_PREFILL_TIMEOUT_SECS", PREFILL_TIMEOUT_S, float)

    async def send(self) -> None:
        """Send both phases. Raise the error of the last worker tried."""
        self._forget()
        if set(self._model.current.worker_ids()) <= self._excluded():
            raise WorkerUnavailable("no decode worker is left for the request")  # Do not prefill in vain.
        if self._stays_whole():
            self._outgoing = whole(self._request)
        elif not await self._prefill():
            return
        self._check_wanted()
        await super().send()
        early, self._early = self._early, None
        if early is not None:
            self._prefill_broke(early)

    async def repeat(self, error: Exception, silent_s: float = 0.0) -> None:
        """Send the request to other workers after `error`, with the tokens received so far."""
        if self._blames_prefill and self.prefill is not None:
            self._generation.excuse_worker()  # The decode worker was only waiting.
            self._prefill_attempts.exclude(self.prefill.instance_id, may_recover=False)
        self._blames_prefill = False
        await super().repeat(error, silent_s)

    def release(self) -> None:
        """Release its worker; once the request is over, its prefill is stopped as well."""
        super().release()
        if self.prefill is not None and self._generation.is_over:
            self._give_up(self.prefill)

    # The decode worker: its request and the eligible workers.

    def _outgoing_request(self) -> PreprocessedRequest:
        return self._outgoing

    def _routing_request(self) -> PreprocessedRequest:
        if self._constraints is None:
            return self._outgoing
        routing = msgspec.structs.replace(self._outgoing.routing or Routing(), routing_constraints=self._constraints)
        return msgspec.structs.replace(self._outgoing, routing=routing)

    def _excluded(self) -> set[int]:
        return self._attempts.excluded | self._out_of_reach

    # The prefill.

    def _forget(self) -> None:
        """Clear the state of an earlier attempt."""
        if self.prefill is not None:
            self._give_up(self.prefill)
            self.prefill.release()  # The request is sent to the same routers again, under the same id.
        self.prefill = self._early = self._constraints = None
        self._out_of_reach = frozenset()
        self._tokens_before = self._generation.tokens

    def _give_up(self, prefill: PrefillPhase) -> None:
        """Stop a prefill; if its decode worker has responded, first wait for it to end by itself."""
        has_answered = self._generation.tokens > self._tokens_before
        prefill.give_up(after_s=LAST_WORDS_S if has_answered else 0.0)

    def _check_wanted(self) -> None:
        """Raise `Cancelled` if the client disconnected and the prefill worker has no blocks for a decode worker to fetch."""
        if self._generation.is_over and self.prefill is not None and not self.prefill.is_done:
            raise Cancelled("the client disconnected before the prompt was computed")

    def _stays_whole(self) -> bool:
        """Return whether the decode worker computes the prompt because that is expected to be faster."""
        return computes_locally(
            self._model,
            self._request,
            self._request_id,
            avoid=self._attempts.excluded,
            prefill_avoid=self._prefill_attempts.excluded,
        )

    async def _prefill(self) -> bool:
        """Compute the prompt. Return True if a decode phase follows, False if the response is complete."""
        last: Exception | None = None
        for _ in range(SENDS_MAX):
            phase: PrefillPhase | None = None
            try:
                phase = await self._send_prefill()
                found = await self._result(phase)
            except WorkerUnavailable as error:
                if self._generation.is_over:
                    raise
                if phase is not None:
                    self._blame(phase, error)
                    last = error
                elif self._prefill_attempts.can_readmit:
                    await self._readmit_prefill_workers()
                elif self._may_stay_whole():
                    break
                else:
                    raise error if last is None else more_informative(last, error) from None
            else:
                if found is None:
                    if not self._generation.is_over:
                        phase.replay_to(self._generation)
                    return False
                self._goes_on(phase, found)
                return True
        if not self._may_stay_whole():
            raise last or WorkerUnavailable("no prefill worker accepted the request")
        logger.warning("request %s: no prefill worker is left; its decode worker computes the prompt", self._request_id)
        self.prefill = None
        self._outgoing = whole(self._request)
        return True

    async def _result(self, phase: PrefillPhase) -> PrefillResult | BootstrapInfo | None:
        """Return the input of the decode phase: result or address; None if the response is complete. Raise its error."""
        if phase.meeting is not None and phase.error is None and phase.served.mode not in SEQUENTIAL_MODES:
            phase.report_failure(self._prefill_broke)
            return phase.meeting
        computing = self._metrics.phase("prefill").dispatch
        computing.inc()
        try:
            result = await phase.wait(self._timeout_s)
        finally:
            computing.dec()
        if phase.is_whole:
            return None
        if not phase.is_done:
            phase.report_failure(self._prefill_broke)
        return phase.meeting or result

    async def _readmit_prefill_workers(self) -> None:
        """Make the workers whose connection broke eligible again after a delay: no other worker is left."""
        attempts = self._prefill_attempts
        await self._clock.sleep(attempts.readmission_delay_s(self._generation.tokens, random.random()))
        attempts.readmit()

    def _may_stay_whole(self) -> bool:
        return self._model.current.prefills_locally

    def _goes_on(self, phase: PrefillPhase, found: PrefillResult | BootstrapInfo) -> None:
        """Build the decode request, now that the prefill worker and its result or address are known."""
        self._outgoing = decode_request(self._request, phase.instance_id, phase.dp_rank, found)
        reach = reach_of(self._model, self._request, phase.served, phase.instance_id)
        self._constraints, self._out_of_reach = reach.constraints, reach.out_of_reach
        routing = self._request.routing
        is_pinned = routing is not None and routing.prefill_worker_id is not None
        if is_pinned and reach.is_empty:
            raise Unknown(  # A repetition fails as well, unlike one for which a worker is missing.
                f"no decode worker can receive KV blocks from prefill worker {phase.instance_id}: "
                f"it requires {', '.join(reach.required)}"
            )

    async def _send_prefill(self) -> PrefillPhase:
        """Choose a prefill worker and send it its request. Raise `WorkerUnavailable` if there is none."""
        served = prefill_set_of(self._model)
        if served is None:
            raise WorkerUnavailable("no prefill worker serves the model at the moment")
        choosing = self._metrics.phase("prefill").route
        choosing.inc()
        try:
            phase = await self._choose_prefill(served)
        finally:
            choosing.dec()
        phase.meet(self._meeting(phase))
        request = prefill_request(self._request, phase.instance_id, phase.dp_rank, phase.meeting)
        with Rollback(partial(self._abandon_prefill, phase)):
            try:
                self._check_wanted()
                call = await phase.served.send(
                    encode_client_json(request),
                    phase,
                    request_id=self._request_id,
                    instance_id=phase.instance_id,
                    headers=self._headers,
                    metadata=self._metadata,
                    exclude=frozenset(),
                )
            except WorkerUnavailable as error:
                phase.on_error(error)
            else:
                phase.keep(served.current.sessions, self._request)
                phase.sent(call)
                if phase.served.routed is not None:
                    phase.served.routed.sent(len(request.token_ids))
        return phase

    def _abandon_prefill(self, phase: PrefillPhase) -> None:
        phase.report_failure(None)
        phase.on_error(Cancelled("the prefill was not sent"))

    async def _choose_prefill(self, served: ServedModel) -> PrefillPhase:
        routing = self._request.routing
        named = routing.prefill_worker_id if routing is not None else None
        if named is not None and named not in served.client.instance_ids():
            raise InvalidArgument(
                f"prefill_worker_id {named} is not a prefill worker of model `{served.name}`",
                param="nvext.prefill_worker_id",
            )
        exclude = frozenset(self._prefill_attempts.excluded)
        if served.kv is None:
            if named is None:
                named = served.bound(self._request, exclude)
            worker = served.pick(exclude) if named is None else named
            is_named = routing is not None and (routing.prefill_dp_rank is not None or routing.dp_rank is not None)
            rank = None if is_named else served.next_rank(worker)
            phase = PrefillPhase(served, self._request_id, worker, dp_rank=rank)
            self.prefill = phase
            return phase
        phase = PrefillPhase(served, self._request_id, queue_depth=len(served.kv.machine.waiting))
        self.prefill = phase  # A client that disconnects removes it from the queue.
        try:
            found = await served.choose(
                prefill_routing_request(self._request),
                self._request_id,
                phase,
                exclude,
                self._metadata,
                onward_costs(self._model, self._request, self._request_id, served),
            )
        except Overloaded as error:
            if served in self._model.current.prefill_sets:
                raise
            raise WorkerUnavailable(str(error)) from None  # Not overload: the set left while the request was queued.
        assert found is not None, "a set with a KV router has a decision"
        phase.book(*found)
        return phase

    def _meeting(self, phase: PrefillPhase) -> BootstrapInfo | None:
        """Return the address for the block transfer, if the worker publishes one."""
        card = phase.served.card_of(phase.instance_id)
        where = card.runtime_config.disaggregated_endpoint if card is not None else None
        if not where or where.bootstrap_host is None or where.bootstrap_port is None:
            return None
        return BootstrapInfo(where.bootstrap_host, where.bootstrap_port, random.getrandbits(63), random.randbytes(16))

    # Failures.

    def _prefill_broke(self, error: Exception) -> None:
        """Fail the decode phase that waits for a failed prefill, so that both phases are retried."""
        generation = self._generation
        if generation.is_over or generation.tokens > self._tokens_before:
            return  # The request is over, or the blocks had been transferred.
        if generation.call is None:
            self._early = error
            return
        self._blames_prefill = True
        generation.on_error(error)

    def _blame(self, phase: PrefillPhase, error: Exception) -> None:
        """Record the failure of a prefill worker, and count the retry."""
        is_unreachable = isinstance(error, CannotConnect)
        self._prefill_attempts.exclude(phase.instance_id, may_recover=is_unreachable or connection_broke(error))
        kind = "ongoing_request" if self._generation.tokens else "new_request"
        self._metrics.migrations.labels(model=self._model.name, migration_type=kind).inc()
