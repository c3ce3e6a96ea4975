"""Request views: the records of requests as the console shows them, with stages for a waterfall and a sentence about the longest. Pure."""

from collections.abc import Iterable

import msgspec

from dynamo.serving.recent_requests import RequestFacts

STAGES_EXPLAINED = {
    "preprocess": "the chat template and the tokenizer",
    "route": "the choice of a worker",
    "dispatch": "sending the request to the worker",
    "prefill": "the prefill worker",
    "first_token": "the worker, before its first token",
    "decode": "generating the output",
    "finish": "completing the response",
}
"""What each stage spends its time on."""


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
    explanation: str = ""


def view_of(facts: RequestFacts, now_s: float, wall_s: float) -> RequestView:
    """Return the view of a request. `now_s` is the time by `time.perf_counter`, `wall_s` that of the wall clock."""
    is_running = not facts.ended_at
    end_s = now_s if is_running else facts.ended_s
    total_s = end_s - facts.started_s
    gaps = facts.output_tokens - 1
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
        itl_ms=_ms((facts.last_s - facts.first_s) / gaps) if facts.first_s and gaps > 0 else None,
        prompt_tokens=facts.prompt_tokens,
        output_tokens=facts.output_tokens,
        cached_tokens=facts.cached_tokens,
        workers=[f"{one:x}" for one in facts.workers],
        dp_rank=facts.dp_rank,
        prefill_worker=None if facts.prefill_worker is None else f"{facts.prefill_worker:x}",
        cost=None if facts.cost is None else round(facts.cost, 3),
        overlap_blocks=facts.overlap_blocks,
        blocks=facts.blocks,
        queue_depth=facts.queue_depth,
        stages=_stages(facts, end_s, is_running=is_running),
        moves=[
            MoveView(
                _ms(move.at_s - facts.started_s),
                None if move.worker_id is None else f"{move.worker_id:x}",
                move.error,
                move.tokens,
            )
            for move in facts.moves
        ],
    )
    view.explanation = explanation(view)
    return view


def explanation(view: RequestView) -> str:
    """Return one sentence about where the time went, or why the request failed."""
    if view.state == "failed":
        return f"Failed ({view.error_type}): {view.error}" if view.error else f"Failed: {view.error_type}"
    if not view.stages or not view.total_ms:
        return ""
    longest = max(view.stages, key=lambda one: _length(one, view.total_ms))
    length_ms = _length(longest, view.total_ms)
    share = round(100 * length_ms / view.total_ms)
    text = f"{share} % of {_duration(view.total_ms)} went to {STAGES_EXPLAINED[longest.name]}"
    if longest.name == "route" and view.queue_depth:
        text += f", where {view.queue_depth} other request(s) waited"
    if longest.name in ("first_token", "prefill") and view.prompt_tokens:
        cached = view.cached_tokens or 0
        text += f": {view.prompt_tokens - cached} of {view.prompt_tokens} prompt tokens were not cached"
    if longest.name == "decode" and view.itl_ms:
        text += f": {view.output_tokens} tokens at {view.itl_ms:g} ms each"
    if view.moves:
        text += f"; sent to another worker {len(view.moves)} time(s)"
    return text + "."


def selected(
    views: Iterable[RequestView], *, state: str = "", model: str = "", request_id: str = "", limit: int
) -> list[RequestView]:
    """Return the views that match, at most `limit`: `slow` sorts by time to first token, every other state by start."""
    states = {"running": ("running",), "failed": ("failed",), "slow": ("succeeded", "failed")}.get(state)
    found = [
        one
        for one in views
        if (states is None or one.state in states)
        and (not model or one.model == model)
        and (not request_id or one.id == request_id)
    ]
    if state == "slow":
        found.sort(key=lambda one: -(one.ttft_ms or 0.0))
    else:
        found.sort(key=lambda one: (one.state != "running", -one.started_at))
    return found[:limit]


def _stages(facts: RequestFacts, end_s: float, *, is_running: bool) -> list[Stage]:
    """Return the stages in order; the last one of a running request is in progress."""
    route_began_s, route_ended_s = facts.route_s
    prefill_sent_s, prefill_done_s = facts.prefill_s
    is_moved = bool(facts.first_s and route_began_s > facts.first_s)  # The times are those of the last worker.
    spans: list[tuple[str, float, float]] = [("preprocess", facts.started_s, facts.prepared_s)]
    if facts.prepared_s:
        if prefill_sent_s:
            spans.append(("prefill", prefill_sent_s, prefill_done_s))
        if route_began_s:
            spans.append(("route", route_began_s, route_ended_s))
        if not is_moved and (route_ended_s or facts.sent_s):
            spans.append(("dispatch", route_ended_s or facts.prepared_s, facts.sent_s))
        if facts.sent_s:
            spans.append(("first_token", facts.sent_s, facts.first_s))
    if facts.first_s:
        spans.append(("decode", facts.first_s, facts.last_s if facts.ended_at else 0.0))
        if facts.ended_at:
            spans.append(("finish", facts.last_s, facts.ended_s))
    found = []
    for name, begin_s, finish_s in spans:
        is_open = finish_s < begin_s
        finish_ms = None if is_open and is_running else _ms((end_s if is_open else finish_s) - facts.started_s)
        found.append(Stage(name, _ms(begin_s - facts.started_s), finish_ms))
    return found


def _length(stage: Stage, total_ms: float) -> float:
    return (total_ms if stage.end_ms is None else stage.end_ms) - stage.begin_ms


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
