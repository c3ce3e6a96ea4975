"""Worker paces: time per token of each worker in recent requests, by which a slow worker is distinguished from a long request. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamo.serving.request_facts import RequestFacts

SAMPLES_MAX = 50
"""Recent requests of each worker that are compared."""
OTHERS_MIN = 5
"""Requests of other workers below which nothing is compared."""
OWN_MIN = 3
"""Requests of the worker from which its usual pace counts too."""
SLOW_RATIO = 3.0
"""Ratio to the pace of other workers from which a request was slow. Batches of different sizes differ by less."""
USUAL_RATIO = 2.0
"""The same of the worker's usual pace: one slow request does not make a slow worker."""
PACE_MIN_S = 5e-5
"""Pace below which differences are those of the measurement: tokens that arrive together."""
COMPUTED_MIN = 32
"""Prompt tokens below which the time of a prompt does not depend on their number."""

DECODE, PREFILL = "decode", "prefill"


class PaceComparison(NamedTuple):
    """Seconds per token of a request, and the median of other workers."""

    own_s: float
    others_s: float

    @property
    def is_slow(self) -> bool:
        """Whether the worker of the request was slow."""
        return self.own_s >= SLOW_RATIO * max(self.others_s, PACE_MIN_S)


class WorkerPaces:
    """Seconds per token of the last requests, by worker, model and phase."""

    def __init__(self, requests: Iterable[RequestFacts] = ()) -> None:
        """`requests`: newest first."""
        self._found: dict[tuple[str, str], dict[int, list[float]]] = {}
        self._others: dict[tuple[str, str, int], float | None] = {}
        """Median of the other workers, None for too few samples; computed when it is first needed."""
        for facts in requests:
            if facts.ended_at and not facts.moves:
                self._add(DECODE, facts.model, decode_worker(facts), facts.itl_s)
                self._add(PREFILL, facts.model, prompt_worker(facts), prompt_pace_s(facts))

    def _add(self, phase: str, model: str, worker: int | None, pace_s: float | None) -> None:
        if worker is None or pace_s is None:
            return
        samples = self._found.setdefault((phase, model), {}).setdefault(worker, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(pace_s)

    def compared(self, phase: str, model: str, worker: int | None, pace_s: float | None) -> PaceComparison | None:
        """Return the comparison of a request with those of other workers; None if there are too few."""
        if worker is None or pace_s is None:
            return None
        key, own = (phase, model, worker), self._found.get((phase, model), {}).get(worker, [])
        if key not in self._others:
            self._others[key] = self._median_of_others(*key)
        others_s = self._others[key]
        if others_s is None:
            return None
        if len(own) >= OWN_MIN and median(own) < USUAL_RATIO * others_s:
            return None
        return PaceComparison(pace_s, others_s)

    def _median_of_others(self, phase: str, model: str, worker: int) -> float | None:
        found = self._found.get((phase, model), {})
        others = [one for other, samples in found.items() if other != worker for one in samples]
        return median(others) if len(others) >= OTHERS_MIN else None

    def is_unusual(self, phase: str, model: str, worker: int | None, pace_s: float | None) -> bool:
        """Return whether a request was slow in comparison with others of the same worker."""
        own = self._found.get((phase, model), {}).get(worker, []) if worker is not None else []
        return pace_s is not None and len(own) >= OTHERS_MIN and pace_s >= SLOW_RATIO * median(own)


def decode_worker(facts: RequestFacts) -> int | None:
    """Return the worker that generated the output."""
    return facts.workers[0] if facts.workers else None


def prompt_worker(facts: RequestFacts) -> int | None:
    """Return the worker that computed the prompt."""
    return decode_worker(facts) if facts.prefill_worker is None else facts.prefill_worker


def computed_tokens(facts: RequestFacts) -> int:
    """Return the prompt tokens that were not cached."""
    return max(0, facts.prompt_tokens - (facts.cached_tokens or 0))


def prompt_pace_s(facts: RequestFacts) -> float | None:
    """Return the seconds per computed prompt token; None if that does not depend on the worker's speed."""
    tokens = computed_tokens(facts)
    if facts.prefill_worker is None:
        took_s = facts.first_s - facts.sent_s if facts.first_s and facts.sent_s else 0.0
    else:
        sent_s, done_s = facts.prefill_s
        took_s = done_s - sent_s - facts.prefill_queue_s if done_s else 0.0
    return took_s / tokens if tokens >= COMPUTED_MIN and took_s > 0 else None


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value; the module `statistics` would load fractions with every frontend."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
