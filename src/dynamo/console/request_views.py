"""Request views: the records of requests as the console shows them, with stages for a waterfall and the cause of their duration. Pure."""

from collections.abc import Iterable

import msgspec

from dynamo.console.request_causes import Cause, cause_of, lost_spans
from dynamo.console.worker_paces import WorkerPaces
from dynamo.serving.request_facts import Move, RequestFacts

REQUEST_STATES = ("running", "succeeded", "failed", "slow")
QUEUE_SHOWN_S = 0.001
"""Time in a router's queue from which it is a stage of its own."""


class Stage(msgspec.Struct):
    """One stage; times in milliseconds from the request's start. `end_ms` None: in progress."""

    name: str
    begin_ms: float
    end_ms: float | None


class MoveView(msgspec.Struct):
    """A failure after which the request was sent to another worker."""

    at_ms: float
    worker: str | None
    error: str
    tokens: int


class RequestView(msgspec.Struct, kw_only=True):
    """One request."""

    id: str
    model: str
    endpoint: str
    type: str
    state: str
    """`running`, `succeeded` or `failed`."""
    error_type: str = ""
    error: str = ""
    started_at: float = 0.0
    """Seconds since the epoch."""
    total_ms: float = 0.0
    """Duration, or age while it runs."""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Mean time between output tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    workers: list[str] = []
    dp_rank: int | None = None
    prefill_worker: str | None = None
    cost: float | None = None
    overlap_blocks: int = 0
    blocks: int = 0
    queue_depth: int = 0
    stages: list[Stage] = []
    moves: list[MoveView] = []
    slow_ms: float = 0.0
    """Measure of slowness: time to the first token, and that of the output beyond the model's usual pace."""
    cause: str = ""
    """What took most of the time, a value of `Cause`; empty for a request that failed before it was sent."""
    cause_ms: float = 0.0
    explanation: str = ""


def view_of(facts: RequestFacts, now_s: float, wall_s: float, paces: WorkerPaces | None = None) -> RequestView:
    """Return the view of a request. `now_s` is the time by `time.perf_counter`, `wall_s` that of the wall clock.

    `paces`: those of recent requests, by which a slow worker is found.
    """
    is_running = not facts.ended_at
    end_s = now_s if is_running else facts.ended_s
    total_s = end_s - facts.started_s
    itl_s = facts.itl_s if facts.ended_at else None
    view = RequestView(
        id=facts.request_id,
        model=facts.model,
        endpoint=facts.endpoint,
        type=facts.request_type,
        state="running" if is_running else "failed" if facts.error_type else "succeeded",
        error_type=facts.error_type,
        error=facts.error,
        started_at=(wall_s if is_running else facts.ended_at) - total_s,
        total_ms=_ms(total_s),
        ttft_ms=_ms(facts.first_s - facts.started_s) if facts.first_s else None,
        itl_ms=None if itl_s is None else _ms(itl_s),
        prompt_tokens=facts.prompt_tokens,
        output_tokens=facts.output_tokens,
        cached_tokens=facts.cached_tokens,
        workers=[f"{one:x}" for one in facts.workers],
        dp_rank=facts.dp_rank,
        prefill_worker=f"{facts.prefill_worker:x}" if facts.prefill_worker else None,
        cost=None if facts.cost is None else round(facts.cost, 3),
        overlap_blocks=facts.overlap_blocks,
        blocks=facts.blocks,
        queue_depth=facts.queue_depth,
        stages=_stages(facts, end_s, is_running=is_running),
        moves=[_move(move, facts) for move in facts.moves],
        slow_ms=_ms(facts.slow_s),
    )
    found = cause_of(facts, end_s, paces or WorkerPaces())
    if found.seconds > 0 and (
        facts.prepared_s or not facts.error_type
    ):  # A refused request has no cause of its duration.
        view.cause, view.cause_ms = found.cause.value, _ms(found.seconds)
    view.explanation = explanation(view, found.text)
    return view


def _move(move: Move, facts: RequestFacts) -> MoveView:
    worker = None if move.worker_id is None else f"{move.worker_id:x}"
    return MoveView(_ms(move.at_s - facts.started_s), worker, move.error, move.tokens)


def explanation(view: RequestView, cause: str) -> str:
    """Return where the time went, and first why the request failed if it did."""
    failure = ""
    if view.state == "failed":
        failure = f"Failed ({view.error_type}): {view.error}" if view.error else f"Failed: {view.error_type}"
        if not view.cause:
            return failure
        failure = failure.rstrip(".") + ". "
    if not view.cause or not view.total_ms:
        return failure.strip()
    share = round(100 * view.cause_ms / view.total_ms)
    text = f"{failure}{share} % of {_duration(view.total_ms)} went to {cause}"
    if view.moves and view.cause != Cause.MIGRATION:
        text += f"; sent to another worker {len(view.moves)} time(s)"
    return text + "."


class RequestSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests are shown: the empty value selects all."""

    state: str = ""
    """`running`, `succeeded`, `failed`, or `slow`: requests that ended, the slowest first."""
    model: str = ""
    request_id: str = ""
    cause: str = ""
    slower_than_ms: float = 0.0
    """Minimum duration."""
    limit: int = 100

    def of_facts(self, requests: Iterable[RequestFacts], now_s: float) -> list[RequestFacts]:
        """Return the selected records in the order in which they are shown. The cause is only known of views."""
        found = [one for one in requests if self._matches(one, now_s)]
        if self.state == "slow":
            found.sort(key=lambda one: -one.slow_s)
        else:
            found.sort(key=lambda one: (bool(one.ended_at), -(one.ended_at - one.ended_s + one.started_s)))
        return found if self.cause else found[: self.limit]

    def _matches(self, facts: RequestFacts, now_s: float) -> bool:
        if (self.model and facts.model != self.model) or (self.request_id and facts.request_id != self.request_id):
            return False
        if self.state == "running":
            is_wanted = not facts.ended_at
        elif self.state == "failed":
            is_wanted = bool(facts.ended_at and facts.error_type)
        elif self.state == "succeeded":
            is_wanted = bool(facts.ended_at and not facts.error_type)
        else:
            is_wanted = self.state != "slow" or bool(facts.ended_at)
        return (
            is_wanted and ((facts.ended_s if facts.ended_at else now_s) - facts.started_s) * 1e3 >= self.slower_than_ms
        )

    def of_views(self, views: Iterable[RequestView]) -> list[RequestView]:
        """Return the views of several processes in the order in which they are shown."""
        found = [one for one in views if not self.cause or one.cause == self.cause]
        if self.state == "slow":
            found.sort(key=lambda one: -one.slow_ms)
        else:
            found.sort(key=lambda one: (one.state != "running", -one.started_at))
        return found[: self.limit]


def _stages(facts: RequestFacts, end_s: float, *, is_running: bool) -> list[Stage]:
    """Return the stages in order; the last one of a running request is in progress."""
    route_began_s, route_ended_s = facts.route_s
    prefill_sent_s, prefill_done_s = facts.prefill_s
    is_moved = any(move.at_s <= route_began_s for move in facts.moves)  # The times are those of the last worker.
    spans: list[tuple[str, float, float]] = [("preprocess", facts.started_s, facts.prepared_s)]
    if facts.prepared_s:
        if prefill_sent_s:
            queued_s = prefill_sent_s + facts.prefill_queue_s
            if facts.prefill_queue_s > QUEUE_SHOWN_S:
                spans.append(("prefill_queue", prefill_sent_s, queued_s))
            spans.append(("prefill", queued_s, prefill_done_s))
        if route_began_s and not is_moved:
            queued_s = route_ended_s - facts.queue_s if facts.queue_s > QUEUE_SHOWN_S else route_ended_s
            spans.append(("route", route_began_s, queued_s))
            if queued_s < route_ended_s:
                spans.append(("queue", queued_s, route_ended_s))
        elif is_running and not facts.sent_s and (prefill_done_s or not prefill_sent_s):
            spans.append(("queue", prefill_done_s or facts.prepared_s, 0.0))
        if not is_moved and (route_ended_s or facts.sent_s):
            spans.append(("dispatch", route_ended_s or facts.prepared_s, facts.sent_s))
        if facts.sent_s:
            spans.append(("first_token", facts.sent_s, facts.first_s))
    if facts.first_s:
        is_timed = facts.request_type != "unary"  # The tokens of a unary response are not timed.
        output_s = (facts.last_s if is_timed else facts.ended_s) if facts.ended_at else 0.0
        spans.append(("decode", facts.first_s, output_s))
        if facts.ended_at and is_timed:
            spans.append(("finish", facts.last_s, facts.ended_s))
    spans += [("move", *span) for span in lost_spans(facts, end_s)]
    found = []
    for name, begin_s, finish_s in spans:
        is_open = finish_s < begin_s
        finish_ms = None if is_open and is_running else _ms((end_s if is_open else finish_s) - facts.started_s)
        found.append(Stage(name, _ms(begin_s - facts.started_s), finish_ms))
    return found


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
