"""Request causes: which part of a request took the longest, and why, as a name and a sentence. Pure."""

from enum import StrEnum
from typing import NamedTuple

from dynamo.console.worker_paces import (
    DECODE,
    PREFILL,
    PaceComparison,
    WorkerPaces,
    computed_tokens,
    decode_worker,
    prompt_pace_s,
    prompt_worker,
)
from dynamo.serving.request_facts import RequestFacts


class Cause(StrEnum):
    """What a request spent most of its time on."""

    PREPROCESS = "preprocess"
    ROUTER_QUEUE = "router-queue"
    ROUTING = "routing"
    DISPATCH = "dispatch"
    WORKER_QUEUE = "worker-queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    SLOW_WORKER = "slow-worker"
    MIGRATION = "migration"
    OUTPUT = "output"
    RESPONSE = "response"


class FoundCause(NamedTuple):
    """The cause of a request's duration."""

    cause: Cause
    seconds: float
    text: str


class Parts:
    """Durations of the parts of a request in seconds; time lost by moves is not part of the others."""

    def __init__(self, facts: RequestFacts, end_s: float) -> None:
        prepared_s, sent_s, first_s = facts.prepared_s, facts.sent_s, facts.first_s
        last_s = end_s if facts.request_type == "unary" or not facts.ended_at else facts.last_s
        lost = lost_spans(facts, end_s)
        self.moves = sum(end - begin for begin, end in lost)
        self.preprocess = (prepared_s or end_s) - facts.started_s
        self.prefill_queue, self.prefill = prefill_parts(facts, end_s)
        self.queue, self.routing, self.dispatch = routing_parts(facts, end_s)
        waits_since_s = max(sent_s, facts.prefill_s[1])  # Both phases may be sent at once.
        self.first = without((waits_since_s, first_s or end_s), lost) if sent_s else 0.0
        self.decode = without((first_s, last_s), lost) if first_s else 0.0
        self.response = max(0.0, end_s - last_s) if first_s else 0.0


def cause_of(facts: RequestFacts, end_s: float, paces: WorkerPaces) -> FoundCause:
    """Return the cause of a request's duration until `end_s`."""
    parts = Parts(facts, end_s)
    worker_parts = worker_causes(facts, parts, paces)
    found = [
        FoundCause(Cause.PREPROCESS, parts.preprocess, "the chat template and the tokenizer"),
        queue_cause(facts, parts),
        FoundCause(Cause.ROUTING, parts.routing, "the choice of a worker"),
        FoundCause(Cause.DISPATCH, parts.dispatch, "sending the request to the worker"),
        move_cause(facts, parts),
        *worker_parts,
        FoundCause(Cause.RESPONSE, parts.response, "completing the response"),
    ]
    return max(found, key=lambda one: one.seconds)


def queue_cause(facts: RequestFacts, parts: Parts) -> FoundCause:
    """Return the time in the queues of KV routers."""
    where = "the queue of the prefill router" if parts.prefill_queue > parts.queue else "the queue of the router"
    others = f", with {facts.queue_depth} other request(s)" if facts.queue_depth else ""
    return FoundCause(Cause.ROUTER_QUEUE, parts.queue + parts.prefill_queue, f"{where}: no worker had capacity{others}")


def move_cause(facts: RequestFacts, parts: Parts) -> FoundCause:
    """Return the time lost by failures of workers."""
    if not facts.moves:
        return FoundCause(Cause.MIGRATION, 0.0, "")
    first = facts.moves[0]
    worker = "a worker" if first.worker_id is None else f"worker {first.worker_id:x}"
    times = "" if len(facts.moves) == 1 else f", the first of {len(facts.moves)} failures"
    progress = f"after {first.tokens} tokens" if first.tokens else "before the first token"
    text = f"the move to another worker: {worker} failed {progress} ({first.error}){times}"
    return FoundCause(Cause.MIGRATION, parts.moves, text)


def worker_causes(facts: RequestFacts, parts: Parts, paces: WorkerPaces) -> list[FoundCause]:
    """Return the times that workers took; those of a slow worker are added."""
    slow = slow_decode(facts, paces)
    prompt = prompt_cause(facts, parts, paces)
    output = FoundCause(Cause.OUTPUT, parts.decode, output_text(facts, parts))
    found = [prompt]
    if facts.prefill_worker is not None:
        text = "the decode worker before its first token: transfer of the prompt's KV blocks"
        found.append(FoundCause(Cause.TRANSFER, parts.first, text))
    if slow is None:
        return [*found, output]
    worker = decode_worker(facts)
    seconds = parts.decode
    if prompt.cause is not Cause.WORKER_QUEUE and prompt_worker(facts) == worker:
        seconds, found = seconds + prompt.seconds, found[1:]
    return [*found, FoundCause(Cause.SLOW_WORKER, seconds, slow_text(worker, slow, "per output token"))]


def prompt_cause(facts: RequestFacts, parts: Parts, paces: WorkerPaces) -> FoundCause:
    """Return the time until the prompt was computed: the worker's queue, a slow worker, or the prompt itself."""
    seconds = parts.first if facts.prefill_worker is None else parts.prefill
    computed, worker, pace_s = computed_tokens(facts), prompt_worker(facts), prompt_pace_s(facts)
    name = "the worker" if worker is None else f"worker {worker:x}"
    ahead = facts.tokens_ahead or 0
    if ahead > computed:
        text = f"the queue of {name}: it had {ahead:,.0f} prompt tokens of earlier requests to compute first"
        return FoundCause(Cause.WORKER_QUEUE, seconds, text)
    if facts.requests_ahead > 1 and paces.is_unusual(PREFILL, facts.model, worker, pace_s):
        text = f"the queue of {name}: {facts.requests_ahead} earlier requests were in flight to it"
        return FoundCause(Cause.WORKER_QUEUE, seconds, text)
    compared = paces.compared(PREFILL, facts.model, worker, pace_s)
    if compared is not None and compared.is_slow:
        return FoundCause(Cause.SLOW_WORKER, seconds, slow_text(worker, compared, "per prompt token"))
    text = f"the prompt: {name} computed {computed:,} of {facts.prompt_tokens:,} tokens, which were not cached"
    return FoundCause(Cause.PREFILL, seconds, text)


def slow_decode(facts: RequestFacts, paces: WorkerPaces) -> PaceComparison | None:
    """Return the comparison by which the output came from a slow worker; None if it did not."""
    compared = None if facts.moves else paces.compared(DECODE, facts.model, decode_worker(facts), facts.itl_s)
    return compared if compared is not None and compared.is_slow else None


def slow_text(worker: int | None, compared: PaceComparison, per: str) -> str:
    """Return the sentence about a slow worker."""
    name = "a worker" if worker is None else f"worker {worker:x}"
    return (
        f"{name}, which is slow: {milliseconds(compared.own_s)} {per}, other workers {milliseconds(compared.others_s)}"
    )


def output_text(facts: RequestFacts, parts: Parts) -> str:
    """Return the sentence about the output."""
    gaps = facts.output_tokens - 1
    if gaps < 1:
        return "generating the output"
    return f"generating the output: {facts.output_tokens:,} tokens at {milliseconds(parts.decode / gaps)} each"


def prefill_parts(facts: RequestFacts, end_s: float) -> tuple[float, float]:
    """Return the time in the queue of the prefill workers' router, and that of the prefill worker."""
    sent_s, done_s = facts.prefill_s
    if not sent_s:
        return 0.0, 0.0
    took_s = max(0.0, (done_s or facts.first_s or end_s) - sent_s)
    queue_s = min(took_s, facts.prefill_queue_s)
    return queue_s, took_s - queue_s


def routing_parts(facts: RequestFacts, end_s: float) -> tuple[float, float, float]:
    """Return the time in the router's queue, that of the choice, and that of sending; those after a move are part of it."""
    began_s, ended_s = facts.route_s
    if not facts.prepared_s or any(move.at_s <= began_s for move in facts.moves):
        return 0.0, 0.0, 0.0
    if not ended_s and not facts.sent_s:  # It has not been sent: only a queue takes long.
        waits_since_s = facts.prefill_s[1] or facts.prepared_s
        is_prefilling = bool(facts.prefill_s[0]) and not facts.prefill_s[1]
        return 0.0 if is_prefilling else max(0.0, end_s - waits_since_s), 0.0, 0.0
    queue_s = min(ended_s - began_s, facts.queue_s)
    return (
        queue_s,
        ended_s - began_s - queue_s,
        max(0.0, (facts.sent_s or end_s) - (ended_s or facts.prefill_s[1] or facts.prepared_s)),
    )


def lost_spans(facts: RequestFacts, end_s: float) -> list[tuple[float, float]]:
    """Return the spans from the last output before each failure to the first one after it; without overlaps."""
    found: list[tuple[float, float]] = []
    for place, move in enumerate(facts.moves):
        following = facts.moves[place + 1].at_s if place + 1 < len(facts.moves) else end_s
        begin_s = move.silent_s or (move.at_s if move.tokens else facts.sent_s or move.at_s)
        if found:
            begin_s = max(begin_s, found[-1][1])
        found.append((begin_s, max(begin_s, move.resumed_s or following)))
    return found


def without(span: tuple[float, float], lost: list[tuple[float, float]]) -> float:
    """Return the duration of a span without the lost ones."""
    begin_s, end_s = span
    return max(0.0, end_s - begin_s - sum(max(0.0, min(end_s, end) - max(begin_s, begin)) for begin, end in lost))


def milliseconds(seconds: float) -> str:
    """Return a duration with its unit."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
