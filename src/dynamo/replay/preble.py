"""Preble: the placement rule of the Preble paper, for comparison."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.core.errors import NotReady
from dynamo.kv_router.index import KvIndex
from dynamo.mocker.simulation.blocks import Change
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass
from dynamo.replay.placement import DEVICE, Caches, PlacementRequest, RankId, apply_change, check_caches

PREBLE_WINDOW_S = 180.0  # The paper's window of three minutes, over which a worker's load is summed.
PREBLE_IMBALANCE = 2.0  # Ratio of loads above which the least loaded worker replaces the most loaded one.


@dataclass(slots=True)
class _Sent:
    at_s: float
    seconds: float


class PreblePlacement:
    """Preble's E2 rule: exploit a cache that has more than half of the prompt, otherwise explore.

    Exploiting chooses the worker with the longest cached prefix, and the least loaded of several; exploring chooses the
    worker with the least load. A worker's load is the estimated time of its requests of the last three minutes:
    uncached prompt tokens, and answers of average length. Its eviction cost, which needs the frequency of every evicted
    prefix, is not implemented.
    """

    def __init__(self, seed: int, prefill_token_s: float = 2e-5, output_token_s: float = 1e-4) -> None:
        self._index = KvIndex()
        self._rng = random.Random(seed)
        self._prefill_token_s = prefill_token_s
        self._output_token_s = output_token_s
        self._output_tokens = 256.0
        self._sent: dict[RankId, deque[_Sent]] = {}
        self._load: dict[RankId, float] = {}
        self._running: dict[str, RankId] = {}

    @property
    def learns(self) -> bool:
        return False

    @property
    def follows_caches(self) -> bool:
        return True

    @property
    def counts_answers(self) -> bool:
        return False

    @property
    def waiting(self) -> int:
        return 0

    @property
    def queued(self) -> tuple[int, int]:
        return 0, 0

    def place(self, request: PlacementRequest, now_s: float) -> RankId | None:
        if not self._load:
            raise NotReady("no worker in service")
        self._expire(now_s)
        blocks = len(request.packed) // 8
        depths = {
            rank_id: depth
            for rank_id, depth in self._index.depth_by_rank(self._index.find(request.packed)).items()
            if rank_id in self._load
        }
        longest = max(depths.values(), default=0)
        if longest * 2 > blocks:
            rank_id = self._least([rank_id for rank_id, depth in depths.items() if depth == longest])
            least = min(self._load.values())
            if self._load[rank_id] > PREBLE_IMBALANCE * least + self._prefill_token_s * request.tokens:
                rank_id = self._least(list(self._load))
        else:
            rank_id = self._least(list(self._load))
        missed = request.tokens * (1 - depths.get(rank_id, 0) / blocks) if blocks else request.tokens
        seconds = self._prefill_token_s * missed + self._output_token_s * self._output_tokens
        self._sent[rank_id].append(_Sent(now_s, seconds))
        self._load[rank_id] += seconds
        self._running[request.request_id] = rank_id
        return rank_id

    def admit(self, now_s: float) -> list[tuple[str, RankId | Exception]]:
        return []

    def withdraw(self, request_id: str) -> None:
        pass

    def prefilled(self, request_id: str, now_s: float) -> None:
        pass

    def finish(self, request_id: str, output_tokens: int | None, now_s: float) -> None:
        del self._running[request_id]
        if output_tokens is not None:
            self._output_tokens += 0.02 * (output_tokens - self._output_tokens)

    def apply(self, rank_id: RankId, event: Change | KvEvent, tier: str = DEVICE) -> None:
        apply_change(self._index, rank_id, event, tier)

    def observe(self, rank_id: RankId, passed: ForwardPass) -> None:
        pass

    def join(self, worker: int, ranks: int, blocks: int, batch_tokens: int) -> None:
        for rank in range(ranks):
            self._load[worker, rank] = 0.0
            self._sent[worker, rank] = deque()

    def leave(self, worker: int) -> None:
        for rank_id in [rank_id for rank_id in self._load if rank_id[0] == worker]:
            del self._load[rank_id], self._sent[rank_id]
        self._running = {name: rank_id for name, rank_id in self._running.items() if rank_id[0] != worker}
        self._index.remove_worker(worker)

    def deepest(self, packed: bytes, now_s: float) -> int:
        return max(self._index.depth_by_rank(self._index.find(packed)).values(), default=0)

    def validate(self, caches: Caches) -> None:
        assert not self._running, "finished requests are counted"
        check_caches(self._index, caches)

    def _least(self, rank_ids: Sequence[RankId]) -> RankId:
        best = min(self._load[rank_id] for rank_id in rank_ids)
        return self._rng.choice([rank_id for rank_id in rank_ids if self._load[rank_id] == best])

    def _expire(self, now_s: float) -> None:
        for rank_id, sent in self._sent.items():
            while sent and now_s - sent[0].at_s >= PREBLE_WINDOW_S:
                self._load[rank_id] -= sent.popleft().seconds
            if not sent:
                self._load[rank_id] = 0.0
