"""SlotTracker: the active requests of every rank of every model.

Models are separated by name and routing group. Requests identify their blocks by sequence hashes, signed or unsigned.
Only records; makes no decisions and has no I/O apart from its clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import HttpError
from dynamo.kv_router.active import ActiveLoad
from dynamo.kv_router.config import EXPIRY_S
from dynamo.kv_router.runs import pack, slots_of
from dynamo.protocols.active_sequences import AddedSequence
from dynamo.tokens.hashing import U64

DEFAULT_GROUP = "default"

Place = tuple[str, str]
"""Model and routing group."""
Rank = tuple[int, int]


class TrackedWorker(msgspec.Struct, frozen=True):
    """A worker, as registered and as returned by the API."""

    worker_id: int
    model_name: str
    routing_group: str
    block_size: int
    dp_start: int
    dp_size: int


class TrackedRankLoad(msgspec.Struct):
    """The load of one rank."""

    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int


class PotentialLoad(msgspec.Struct):
    """The load that one rank would have with a further request."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


@dataclass(slots=True)
class _TrackedModel:
    """The ranks of one model and group, by slot."""

    load: ActiveLoad
    slots: dict[Rank, int]
    free: list[int]

    def reach(self, rank: Rank) -> None:
        slot = self.free.pop() if self.free else len(self.slots)
        self.slots[rank] = slot
        self.load.reach(slot)


class SlotTracker:
    """The load of all models."""

    def __init__(self, clock: Clock, expiry_s: float = EXPIRY_S) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._workers: dict[tuple[Place, int], TrackedWorker] = {}
        self._models: dict[Place, _TrackedModel] = {}

    # Workers.

    def workers(self, model_name: str | None = None, routing_group: str | None = None) -> list[TrackedWorker]:
        """Return the registered workers, optionally of one model or group only."""
        return [
            worker
            for _, worker in sorted(self._workers.items(), key=lambda one: one[0])
            if model_name in (None, worker.model_name) and routing_group in (None, worker.routing_group)
        ]

    def register(self, worker: TrackedWorker) -> None:
        """Register a worker. Raises `HttpError` for a duplicate, or a block size that differs from the others'."""
        place = (worker.model_name, worker.routing_group)
        if (place, worker.worker_id) in self._workers:
            raise HttpError(409, f"worker {worker.worker_id} already registered for {shown(place)}")
        if worker.block_size < 1:
            raise HttpError(400, "block_size must be greater than 0")
        if worker.dp_size < 1:
            raise HttpError(400, "dp_size must be greater than 0")
        if worker.dp_start < 0:
            raise HttpError(400, "dp_start must be 0 or more")
        for other in self._workers.values():
            if (other.model_name, other.routing_group) == place and other.block_size != worker.block_size:
                message = f"block_size mismatch for {shown(place)}: existing={other.block_size}, requested={worker.block_size}"
                raise HttpError(409, message)
        model = self._models.get(place)
        if model is None:
            model = self._models[place] = _TrackedModel(ActiveLoad(expiry_s=self._expiry_s), {}, [])
        self._workers[(place, worker.worker_id)] = worker
        for dp_rank in range(worker.dp_start, worker.dp_start + worker.dp_size):
            model.reach((worker.worker_id, dp_rank))

    def unregister(self, worker_id: int, model_name: str, routing_group: str) -> None:
        """Remove a worker and its requests. Raises `HttpError`."""
        place = (model_name, routing_group)
        if self._workers.pop((place, worker_id), None) is None:
            raise HttpError(404, f"worker {worker_id} not found for {shown(place)}")
        model = self._models[place]
        for rank in [rank for rank in model.slots if rank[0] == worker_id]:
            slot = model.slots.pop(rank)
            model.load.drop(slot)
            model.free.append(slot)
        if not model.slots:
            del self._models[place]

    # Requests.

    def add(
        self, request_id: str, rank: Rank, place: Place, sequence_hashes: Sequence[int], prefill_tokens: int
    ) -> None:
        """Record a request that was routed to a rank. Raises `HttpError` for a duplicate request or an unknown rank."""
        model, now = self._model(place), self._clock.now()
        model.load.expire(now)
        at = model.load.slot_of(request_id)
        if at is not None:
            worker_id, dp_rank = next(rank for rank, slot in model.slots.items() if slot == at)
            assigned = f"worker {worker_id}, dp_rank {dp_rank}"
            raise HttpError(409, f"Request {request_id} already exists (assigned to {assigned})")
        slot = model.slots.get(rank)
        if slot is None:
            raise HttpError(404, f"Worker {rank[0]}, dp_rank {rank[1]} not found")
        model.load.book(request_id, slot, packed(sequence_hashes), prefill_tokens=prefill_tokens, now=now)

    def prefill_complete(self, request_id: str, place: Place) -> bool:
        """Record a request's first token; False for an unknown request. Raises `HttpError` for an unknown model."""
        return self._model(place).load.prefilled(request_id)

    def free(self, request_id: str, place: Place) -> bool:
        """Remove a request. Return False for an unknown one, which may have ended before."""
        return self._model(place).load.finish(request_id)

    def loads(self, model_name: str | None = None, routing_group: str | None = None) -> list[TrackedRankLoad]:
        """Return the load of every rank."""
        found = []
        for place, model in sorted(self._models.items()):
            if model_name in (None, place[0]) and routing_group in (None, place[1]):
                model.load.expire(self._clock.now())
                for rank, slot in sorted(model.slots.items()):
                    load = model.load
                    found.append(TrackedRankLoad(*place, *rank, load.prefill_tokens[slot], int(load.blocks[slot])))
        return found

    def potential_loads(self, place: Place, sequence_hashes: Sequence[int], prefill_tokens: int) -> list[PotentialLoad]:
        """Return the load of every rank of a model with a further request. Raises `HttpError` for an unknown model."""
        model = self._model(place)
        load = model.load
        load.expire(self._clock.now())
        shared: dict[int, int] = {}
        for depth, slots in load.overlap(packed(sequence_hashes)):
            shared |= dict.fromkeys(slots_of(slots), depth)
        count = len(sequence_hashes)
        return [
            PotentialLoad(
                *rank,
                load.prefill_tokens[slot] + prefill_tokens,
                int(load.blocks[slot]) + count - shared.get(slot, 0),
                load.requests[slot],
            )
            for rank, slot in sorted(model.slots.items())
        ]

    # Requests of peers (`llm.replica_peers`).

    def block_size(self, place: Place) -> int:
        """Return the block size of a model's workers; 0 for an unknown model."""
        return next(
            (one.block_size for one in self._workers.values() if (one.model_name, one.routing_group) == place), 0
        )

    def rank_of(self, request_id: str, place: Place) -> Rank | None:
        """Return the rank that a request was routed to."""
        model = self._models.get(place)
        slot = None if model is None else model.load.slot_of(request_id)
        if model is None or slot is None:
            return None
        return next(rank for rank, own in model.slots.items() if own == slot)

    def replica_added(self, request_id: str, rank: Rank, place: Place, added: AddedSequence) -> None:
        """Record a request that a peer routed to a rank; ignore unknown ranks."""
        model = self._models.get(place)
        slot = None if model is None else model.slots.get(rank)
        if model is None or slot is None:
            return
        hint = added.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint is not None and added.track_prefill_tokens else 0
        now = self._clock.now()
        model.load.book(request_id, slot, packed(added.token_sequence or ()), prefill_tokens=tokens, now=now)

    def replica_prefilled(self, request_id: str, place: Place) -> None:
        """Record the first token of a peer's request."""
        if place in self._models:
            self._models[place].load.prefilled(request_id)

    def replica_freed(self, request_id: str, place: Place) -> None:
        """Remove a peer's request."""
        if place in self._models:
            self._models[place].load.finish(request_id)

    def _model(self, place: Place) -> _TrackedModel:
        model = self._models.get(place)
        if model is None:
            raise HttpError(404, f"no slot tracker for {shown(place)}")
        return model


def packed(sequence_hashes: Sequence[int]) -> bytes:
    """Return sequence hashes in the format of the load state."""
    return pack([one & U64 for one in sequence_hashes])


def shown(place: Place) -> str:
    """Format a model and group for messages."""
    return f"model={place[0]} routing_group={place[1]}"
