"""Push router: selection of a worker without regard to KV caches.

Pure: workers, requests in flight and the time are arguments. A worker that failed is *inhibited* for a while: it is
selected last rather than never, so that the only worker of a model remains usable.
"""

import enum
import random
from collections.abc import Collection, Iterable


class RouterMode(enum.Enum):
    """Policy for choosing a worker."""

    RoundRobin = "round-robin"
    Random = "random"
    PowerOfTwoChoices = "power-of-two"
    LeastLoaded = "least-loaded"
    DeviceAwareWeighted = "device-aware-weighted"
    """CPU workers once the others have their share by capacity; of these workers the one with the fewest requests."""
    Direct = "direct"
    KV = "kv"
    """By cached blocks (`llm.kv_push_router`); requests without KV routing use round robin."""

    # Alternative spelling of the same value.
    ROUND_ROBIN = RoundRobin
    RANDOM = Random
    POWER_OF_TWO = PowerOfTwoChoices
    LEAST_LOADED = LeastLoaded
    DEVICE_AWARE_WEIGHTED = DeviceAwareWeighted
    DIRECT = Direct


DEVICE_RATIO = 8.0
"""Number of CPUs equal to one other device (`DYN_ENCODER_CUDA_TO_CPU_RATIO`)."""


class PushRouter:
    """Workers of one endpoint as seen by one caller."""

    def __init__(
        self, mode: RouterMode, inhibited_s: float = 5.0, seed: int | None = None, device_ratio: float = DEVICE_RATIO
    ) -> None:
        """Create a router; `device_ratio` is the number of CPUs equal to one other device."""
        self.mode = mode
        self._device_ratio = device_ratio
        self._cpus: frozenset[int] = frozenset()
        self._inhibited_s = inhibited_s
        self._random = random.Random(seed)
        self._ids: list[int] = []
        self._inflight: dict[int, int] = {}
        self._inhibited_until: dict[int, float] = {}
        self._turn = 0

    @property
    def ids(self) -> list[int]:
        """Return the ids of the present workers in order."""
        return self._ids

    def update(self, ids: Iterable[int], cpus: Iterable[int] = ()) -> None:
        """Set the present workers, `cpus` of them on CPUs. Requests to absent workers are counted until they end."""
        self._ids = sorted(ids)
        self._cpus = frozenset(cpus)
        present = set(self._ids)
        for worker in [worker for worker in self._inhibited_until if worker not in present]:
            del self._inhibited_until[worker]

    def inflight(self, worker: int) -> int:
        return self._inflight.get(worker, 0)

    def begin(self, worker: int) -> None:
        """Count a request to this worker."""
        self._inflight[worker] = self._inflight.get(worker, 0) + 1

    def end(self, worker: int) -> None:
        """Remove a finished request of this worker."""
        left = self._inflight.get(worker, 0) - 1
        assert left >= 0, "end() without a matching begin()"
        if left:
            self._inflight[worker] = left
        else:
            del self._inflight[worker]

    def inhibit(self, worker: int, now: float) -> None:
        """Deprioritize this worker for a while, because it failed."""
        if self._inhibited_s > 0 and worker in self._ids:
            self._inhibited_until[worker] = now + self._inhibited_s

    def inhibited(self, now: float) -> list[int]:
        """Return the workers that failed recently and are deprioritized."""
        if not self._inhibited_until:
            return []
        return [worker for worker, until in self._inhibited_until.items() if until > now]

    def is_inhibited(self, worker: int, now: float) -> bool:
        """Return whether the worker failed recently and is deprioritized."""
        return self._inhibited_until.get(worker, now) > now

    def pick(self, now: float, exclude: Collection[int] = (), mode: RouterMode | None = None) -> int | None:
        """Return the worker for the next request; None when all present workers are excluded."""
        mode = mode or self.mode
        candidates = self._candidates(now, exclude) if exclude or self._inhibited_until else self._ids
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        if mode is RouterMode.RANDOM:
            return self._random.choice(candidates)
        if mode is RouterMode.POWER_OF_TWO:
            one, other = self._random.sample(candidates, 2)
            return one if self.inflight(one) <= self.inflight(other) else other
        turn = self._turn
        self._turn = turn + 1
        if mode is RouterMode.DEVICE_AWARE_WEIGHTED:
            candidates = self._less_loaded_devices(candidates)
        if mode in (RouterMode.LEAST_LOADED, RouterMode.DEVICE_AWARE_WEIGHTED):
            start = turn % len(candidates)
            return min(candidates[start:] + candidates[:start], key=self.inflight)
        return candidates[turn % len(candidates)]

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._ids == sorted(set(self._ids)), "worker ids must be sorted and unique"
        assert all(count > 0 for count in self._inflight.values()), "in-flight counts must be positive"
        assert set(self._inhibited_until) <= set(self._ids), "inhibited workers must be present"

    def _less_loaded_devices(self, candidates: list[int]) -> list[int]:
        """Return the CPU workers if they have fewer requests than their share by capacity, otherwise the other workers."""
        cpus = [worker for worker in candidates if worker in self._cpus]
        others = [worker for worker in candidates if worker not in self._cpus]
        if not cpus or not others:
            return candidates
        on_cpus, on_others = (sum(map(self.inflight, workers)) for workers in (cpus, others))
        # Rounded down: CPUs are idle until the other devices have as many requests as one CPU equals.
        allowed_on_cpus = int(on_others * len(cpus) / (len(others) * self._device_ratio))
        return cpus if on_cpus < allowed_on_cpus else others

    def _candidates(self, now: float, exclude: Collection[int]) -> list[int]:
        for worker in [worker for worker, until in self._inhibited_until.items() if until <= now]:
            del self._inhibited_until[worker]
        allowed = [worker for worker in self._ids if worker not in exclude]
        sound = [worker for worker in allowed if worker not in self._inhibited_until]
        return sound or allowed
