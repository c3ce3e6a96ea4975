"""Recent requests: bounded records of the requests that ended, for operators who look for the cause of a slow or failed one.

Recording runs once per request and copies numbers; it keeps neither prompts nor responses.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.serving.migration import Dispatch
from dynamo.serving.request_facts import RequestFacts

if TYPE_CHECKING:
    from dynamo.protocols.engine import CompletionUsage
    from dynamo.serving.answers import BaseAnswer

RECENT_MAX = 1000
"""Records of the last requests: half a megabyte."""
FAILED_MAX = 200
SLOWEST_MAX = 100
SLOWEST_AGE_S = 900.0
"""Age after which a slow request gives way to a faster one."""
MODELS_MAX = 256
"""Models whose usual pace is kept."""
PACE_WEIGHT = 0.05
"""Weight of a request in the usual pace of its model: that of about the last 20."""
ERROR_CHARS_MAX = 500
WORKERS_MAX = 1024
"""Workers whose last error is kept; the oldest error is dropped first."""


class WorkerError(msgspec.Struct):
    """Last failure of a worker that a request met."""

    at: float
    """Wall clock time in seconds since the epoch."""
    message: str


class RecentRequests:
    """The last requests that ended, the last that failed, the slowest, and the last error of each worker."""

    def __init__(self) -> None:
        self._recent: deque[RequestFacts] = deque(maxlen=RECENT_MAX)
        self._failed: deque[RequestFacts] = deque(maxlen=FAILED_MAX)
        self._slowest: list[tuple[float, int, RequestFacts]] = []
        """Ascending by `RequestFacts.slow_s`."""
        self._serial = 0
        self._paces: dict[str, float] = {}
        """Moving average of the time between output tokens, by model."""
        self.worker_errors: dict[int, WorkerError] = {}
        """By worker, oldest first."""

    def ended(self, facts: RequestFacts) -> None:
        """Keep a request that ended."""
        self._recent.append(facts)
        if facts.error_type:
            self._failed.append(facts)
        if facts.first_s:
            facts.slow_s = facts.first_s - facts.started_s + self._excess_s(facts)
            self._rank(facts)
        for move in facts.moves:
            self._blame(move.worker_id, facts.ended_at, move.error)
        if facts.error_type in ("internal", "unavailable", "response_timeout") and facts.workers:
            self._blame(facts.workers[-1], facts.ended_at, facts.error)

    def refused(self, endpoint: str, error_type: str, error: str, started_s: float) -> None:
        """Keep a request that was refused before it had a model."""
        self.ended(
            RequestFacts(
                request_id="",
                model="",
                endpoint=endpoint,
                request_type="",
                started_s=started_s,
                error_type=error_type,
                error=error[:ERROR_CHARS_MAX],
                ended_at=time.time(),
                ended_s=time.perf_counter(),
            )
        )

    def all(self) -> Iterator[RequestFacts]:
        """Yield every kept request once, the newest first."""
        seen: set[int] = set()
        slowest = sorted((one for _, _, one in self._slowest), key=lambda one: -one.ended_at)
        for facts in (*reversed(self._recent), *reversed(self._failed), *slowest):
            if id(facts) not in seen:
                seen.add(id(facts))
                yield facts

    def _excess_s(self, facts: RequestFacts) -> float:
        """Return the time of the output beyond the usual pace of the model, and include this request in that pace."""
        itl_s = facts.itl_s
        if itl_s is None:
            return 0.0
        usual_s = self._paces.get(facts.model, itl_s)
        if facts.model in self._paces or len(self._paces) < MODELS_MAX:
            self._paces[facts.model] = usual_s + PACE_WEIGHT * (itl_s - usual_s)
        return max(0.0, itl_s - usual_s) * (facts.output_tokens - 1)

    def _rank(self, facts: RequestFacts) -> None:
        """Keep the request if it is one of the slowest of the last minutes."""
        slow_s, slowest = facts.slow_s, self._slowest
        if len(slowest) >= SLOWEST_MAX:
            if slow_s <= slowest[0][0]:
                return
            oldest = facts.ended_at - SLOWEST_AGE_S
            kept = [one for one in slowest if one[2].ended_at >= oldest]
            self._slowest = slowest = kept if len(kept) < len(slowest) else slowest[1:]
        self._serial += 1
        insort(slowest, (slow_s, self._serial, facts))

    def _blame(self, worker_id: int | None, at: float, message: str) -> None:
        if worker_id is None:
            return
        self.worker_errors.pop(worker_id, None)
        self.worker_errors[worker_id] = WorkerError(at, message[:ERROR_CHARS_MAX])
        if len(self.worker_errors) > WORKERS_MAX:
            del self.worker_errors[next(iter(self.worker_errors))]


def facts_of(
    answer: "BaseAnswer",
    error_type: str = "",
    error: Exception | None = None,
    usage: "CompletionUsage | None" = None,
    ended_s: float = 0.0,
) -> RequestFacts:
    """Return the facts of a response; of one in progress without `ended_s`."""
    state = answer.state
    generations = answer.generations
    facts = RequestFacts(
        request_id=state.request_id,
        model=state.model,
        endpoint=state.endpoint,
        request_type=state.request_type,
        started_s=state.started_s,
        error_type=error_type,
        error="" if error is None else str(error)[:ERROR_CHARS_MAX],
        ended_at=time.time() if ended_s else 0.0,
        ended_s=ended_s,
        prepared_s=state.prepared_s,
        sent_s=state.sent_s,
        first_s=state.first_s,
        last_s=state.last_s,
        workers=tuple(state.workers),
    )
    if usage is not None:
        facts.prompt_tokens, facts.output_tokens = usage.prompt_tokens, usage.completion_tokens
        details = usage.prompt_tokens_details
        facts.cached_tokens = None if details is None else details.cached_tokens
    else:
        facts.prompt_tokens = sum(len(one.request.token_ids) for one in generations)
        facts.output_tokens = sum(one.tokens for one in generations)
    if generations:
        _add_dispatch(facts, generations[0].dispatch, generations[0].worker_id)
    return facts


def _add_dispatch(facts: RequestFacts, dispatch: Any, worker_id: int | None) -> None:
    """Add what the dispatch of the first engine request recorded."""
    if not isinstance(dispatch, Dispatch):
        return
    facts.route_s, facts.moves, facts.requests_ahead = dispatch.route_s, dispatch.moves, dispatch.requests_ahead
    if worker_id is not None and facts.workers[:1] != (worker_id,):
        facts.workers = (worker_id, *facts.workers[1:])
    decision, prefill = dispatch.decision, dispatch.prefill
    if decision is not None:
        facts.dp_rank, facts.cost = decision.dp_rank, decision.cost
        facts.overlap_blocks, facts.blocks = decision.overlap_blocks, decision.blocks
        facts.queue_depth, facts.queue_s = decision.queue_depth, decision.waited_s
        facts.tokens_ahead = decision.tokens_ahead
    if prefill is not None:
        facts.prefill_worker = prefill.instance_id
        facts.prefill_s = prefill.sent_s, prefill.done_s
        if prefill.decision is not None:
            facts.cost, facts.queue_depth = prefill.decision.cost, prefill.queue_depth
            facts.prefill_queue_s, facts.tokens_ahead = prefill.decision.waited_s, prefill.decision.tokens_ahead
            facts.overlap_blocks, facts.blocks = prefill.decision.overlap_blocks, prefill.decision.blocks
