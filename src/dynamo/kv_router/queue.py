"""WaitingQueue: requests that wait for a worker with free capacity, ordered by priority and policy class.

Within a class the highest `strict_priority` goes first, then the highest key:

    fcfs    priority jump - arrival                           earlier first; a jump of n counts as n seconds earlier
    lcfs    priority jump + arrival                           later first, for comparison of policies
    wspt    (1 + priority jump) / uncached prompt tokens      shortest weighted work first
    deadline    priority jump - arrival - stretch x prefill   earliest deadline first: arrival + `STRETCH` times the prefill

With `deadline` short prompts overtake long ones, but only for `STRETCH` times the duration of the long one's own prefill: a request
that arrives later than that does not overtake.

Between classes: deficit round robin. A class may send prompts of `quantum` uncached tokens each round and carries over what
it does not use. A class whose workers are all busy keeps its deficit and earns nothing.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from dynamo.core.errors import ConfigError, RouterQueueLimitExceeded

T = TypeVar("T")

DEFAULT = "default"

STRETCH = 10.0
"""Wait that a request is due, as a multiple of its own prefill. With 10, the mean time to first token is within 3 % of shortest-first
(`wspt`) on the loads of docs/balanced.md."""

QUEUE_TIMEOUT_S = 120.0
"""Maximum wait in the queue: longer than the prefill of any prompt; a request that waited so long is refused."""

REFUSALS = {
    "request_queue_limit_per_worker": "request_limit",
    "raw_isl_token_queue_limit_per_worker": "raw_isl_token_limit",
    "cached_token_queue_limit_per_worker": "cached_token_limit",
}
"""Reason that the metrics give for a request refused at each limit of a class."""


class PolicyClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of requests, as defined in the policy file."""

    name: str = DEFAULT
    policy_family: str = DEFAULT
    cache_bucket: str | None = None
    """Bucket of uncached prompt lengths that the class accepts; None: all."""
    queue_policy: Literal["fcfs", "lcfs", "wspt", "deadline"] = "fcfs"
    quantum: int = 8192
    prefill_busy_threshold: int | None = None
    """A rank with more active prefill tokens is busy for this class."""
    prefill_busy_threshold_frac: float | None = None
    """The same threshold as a fraction of the rank's largest batch."""
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None

    def check(self) -> "PolicyClass":
        """Return the class. Raises `ConfigError` for a number that is out of range."""
        if self.quantum < 1:
            raise ConfigError(f"policy class {self.name}: quantum: must be at least 1, not {self.quantum}")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ConfigError(f"policy class {self.name}: {name}: must be at least 0, not {value}")
        return self

    def limit(self, batch_tokens: int | None) -> float:
        """Return the active prefill tokens above which a rank with that largest batch is busy for this class."""
        found = math.inf if self.prefill_busy_threshold is None else self.prefill_busy_threshold
        if self.prefill_busy_threshold_frac is None or batch_tokens is None:
            return found
        return min(found, self.prefill_busy_threshold_frac * batch_tokens)


class QueuedRequest(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A queued request."""

    item: T
    prompt_tokens: int
    cached_tokens: int
    """The most prompt tokens that one worker has cached."""
    arrived_s: float
    priority_jump: float = 0.0
    strict_priority: int = 0
    prefill_s: float = 0.0
    """Expected duration of its prefill, in seconds."""

    @property
    def uncached(self) -> int:
        """Return the prompt tokens to be computed, at least 1."""
        return max(1, self.prompt_tokens - self.cached_tokens)

    def key(self, policy: str) -> float:
        """Return the sort key; the highest goes first."""
        if policy == "wspt":
            return (1.0 + self.priority_jump) / self.uncached
        if policy == "deadline":
            return self.priority_jump - self.arrived_s - STRETCH * self.prefill_s
        if policy == "lcfs":
            return self.priority_jump + self.arrived_s
        return self.priority_jump - self.arrived_s


class _Lane(Generic[T]):
    """The queue of one class."""

    def __init__(self, policy: PolicyClass) -> None:
        self.policy = policy
        self.heap: list[tuple[int, float, int, QueuedRequest[T]]] = []
        self.deficit = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def head(self) -> QueuedRequest[T]:
        return self.heap[0][3]


class WaitingQueue(Generic[T]):
    """The queues of all classes, bounded by the classes' limits and by `requests_max`."""

    def __init__(self, classes: Sequence[PolicyClass] = (PolicyClass(),), requests_max: int = 65_536) -> None:
        self._classes = {policy.name: policy.check() for policy in classes}
        self._lanes: dict[tuple[str, int | None], _Lane[T]] = {}
        """By class and, for requests restricted to one worker, by that worker; in round-robin order."""
        self._requests_max = requests_max
        self._count = 0
        self._size = 0
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refused requests, by class and reason (`REFUSALS`)."""
        self.expired: Counter[str] = Counter()
        """Number of requests removed because they waited too long, by class."""

    def __len__(self) -> int:
        return self._size

    @property
    def names(self) -> list[str]:
        """Return the names of the classes."""
        return list(self._classes)

    def depth(self, name: str = DEFAULT) -> int:
        """Return the number of queued requests of a class."""
        return self.pending(name)[0]

    def pending(self, name: str) -> tuple[int, int, int]:
        """Return the number of queued requests of a class, their prompt tokens, and how many of these are cached."""
        lanes = [lane for lane in self._lanes.values() if lane.policy.name == name]
        return (
            sum(len(lane.heap) for lane in lanes),
            sum(lane.prompt_tokens for lane in lanes),
            sum(lane.cached_tokens for lane in lanes),
        )

    def policy(self, name: str) -> PolicyClass:
        """Return the class of that name, or the first class."""
        return self._classes.get(name) or next(iter(self._classes.values()))

    def push(self, name: str, waiting: QueuedRequest[T], workers: int = 1, only_worker: int | None = None) -> None:
        """Add a request. Raises `RouterQueueLimitExceeded` at the class's limit times the number of workers.

        `only_worker`: the worker to which the request is restricted. Such requests do not block unrestricted ones.
        """
        policy = self.policy(name)
        lanes = [lane for lane in self._lanes.values() if lane.policy is policy]
        for limit_name, used, wanted in (
            ("request_queue_limit_per_worker", sum(len(lane.heap) for lane in lanes), 1),
            (
                "raw_isl_token_queue_limit_per_worker",
                sum(lane.prompt_tokens for lane in lanes),
                waiting.prompt_tokens,
            ),
            (
                "cached_token_queue_limit_per_worker",
                sum(lane.cached_tokens for lane in lanes),
                waiting.cached_tokens,
            ),
        ):
            limit = getattr(policy, limit_name)
            if limit is not None and used + wanted > limit * workers:
                self.refused[policy.name, REFUSALS[limit_name]] += 1
                raise RouterQueueLimitExceeded(
                    f"the router queue of class {policy.name} is full: {limit_name} {limit} x {workers} workers"
                )
        if self._size >= self._requests_max:
            self.refused[policy.name, "request_limit"] += 1
            raise RouterQueueLimitExceeded(f"the router queue is full: {self._requests_max} requests")
        lane = self._lanes.get((policy.name, only_worker))
        if lane is None:
            lane = self._lanes[(policy.name, only_worker)] = _Lane(policy)
        self._count += 1
        entry = (-waiting.strict_priority, -waiting.key(policy.queue_policy), self._count, waiting)
        heapq.heappush(lane.heap, entry)
        lane.prompt_tokens += waiting.prompt_tokens
        lane.cached_tokens += waiting.cached_tokens
        self._size += 1

    def pop(self, may_go: Callable[[PolicyClass, QueuedRequest[T]], bool]) -> QueuedRequest[T] | None:
        """Return the next admissible request, considering the head of each class; None if there is none."""
        ready = [(name, lane) for name, lane in self._lanes.items() if may_go(lane.policy, lane.head())]
        if not ready:
            return None
        rounds = min(
            max(0, math.ceil((lane.head().uncached - lane.deficit) / lane.policy.quantum)) for _, lane in ready
        )
        for _, lane in ready:
            lane.deficit += rounds * lane.policy.quantum
        name, chosen = next(one for one in ready if one[1].deficit >= one[1].head().uncached)
        waiting = heapq.heappop(chosen.heap)[3]
        chosen.prompt_tokens -= waiting.prompt_tokens
        chosen.cached_tokens -= waiting.cached_tokens
        chosen.deficit -= waiting.uncached
        self._size -= 1
        if not chosen.heap:
            del self._lanes[name]
        elif chosen.deficit < chosen.head().uncached:  # Its turn is over: move the class to the end.
            self._lanes[name] = self._lanes.pop(name)
        return waiting

    def remove(self, wanted: Callable[[T], bool], *, is_late: bool = False) -> list[T]:
        """Remove and return the matching requests, which were cancelled or, if they are late, waited too long."""
        found: list[T] = []
        for name, lane in list(self._lanes.items()):
            leaving = [entry for entry in lane.heap if wanted(entry[3].item)]
            if leaving:
                lane.heap = [entry for entry in lane.heap if not wanted(entry[3].item)]
                heapq.heapify(lane.heap)
                for entry in leaving:
                    lane.prompt_tokens -= entry[3].prompt_tokens
                    lane.cached_tokens -= entry[3].cached_tokens
                    found.append(entry[3].item)
                if is_late:
                    self.expired[lane.policy.name] += len(leaving)
                if not lane.heap:
                    del self._lanes[name]
        self._size -= len(found)
        return found
