"""IndexedModels: one index of cached blocks per model and routing group, fed by the KV events of engines over ZMQ."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.engine_subscriber import EngineEvents, EngineListener, Status
from dynamo.kv_router import events
from dynamo.kv_router.config import BLOCKS_MAX
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.runs import slots_of
from dynamo.protocols.kv_events import WorkerKvEvent

logger = logging.getLogger(__name__)

EVENTS_PER_TURN = 64  # Events of a dump that are applied before the event loop runs other tasks.

Place = tuple[str, str]
"""Model name and routing group."""
Rank = tuple[int, int]

STATUS_ORDER = (Status.FAILED, Status.PAUSED, Status.PENDING, Status.ACTIVE)
"""The status of an instance is the worst one of its ranks."""


class Held(msgspec.Struct):
    """Cached prompt tokens of an instance; a slower tier's count includes the faster ones."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    """Tokens on the device, by rank."""
    cpu: int
    disk: int


class Matches(msgspec.Struct):
    """Cached prompt tokens by instance."""

    scores: dict[str, dict[str, int]]
    """Tokens on the device, by instance and rank."""
    frequencies: list[int]
    instances: dict[str, Held]


class ModelDump(msgspec.Struct):
    """All cached blocks of one model's workers."""

    block_size: int
    events: list[WorkerKvEvent]


class ShownListener(msgspec.Struct, omit_defaults=True):
    """Listener of one rank, as returned by the API."""

    endpoint: str
    status: str
    error: str | None = None


class ShownWorker(msgspec.Struct):
    """Followed instance, as returned by the API."""

    instance_id: int
    source: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str]
    listeners: dict[str, ShownListener]


@dataclass(slots=True)
class IndexedModel:
    """Index of one model and routing group."""

    block_size: int
    index: KvIndex


@dataclass(slots=True)
class _Followed:
    """Listeners of one instance."""

    place: Place
    listeners: dict[int, tuple[EngineListener, asyncio.Task[None]]] = field(default_factory=dict)


class IndexedModels:
    """Indexes of all models, and the instances whose KV events are followed."""

    def __init__(
        self, *, blocks_max: int = BLOCKS_MAX, observe: Callable[[WorkerKvEvent, bool], None] | None = None
    ) -> None:
        """Store the arguments; `observe` receives each event and whether its blocks were known."""
        self.models: dict[Place, IndexedModel] = {}
        self.gate = asyncio.Event()
        """Event that opens the listeners, so that the state of peers is loaded first."""
        self._instances: dict[int, _Followed] = {}
        self._blocks_max = blocks_max
        self._observe = observe
        self._tasks = TaskOwner("engine listeners")

    async def close(self) -> None:
        """Stop all listeners."""
        await self._tasks.cancel_and_wait()

    # Followed instances.

    def follow(
        self,
        instance_id: int,
        dp_rank: int,
        endpoint: str,
        place: Place,
        block_size: int,
        *,
        replay_endpoint: str | None = None,
        salt: str | None = None,
        is_eagle: bool = False,
    ) -> None:
        """Follow one rank. Raises `HttpError` for a conflicting registration or an invalid address."""
        model = self.models.get(place)
        if model is not None and model.block_size != block_size:
            reason = f"block_size mismatch for {shown(place)}: existing={model.block_size}, requested={block_size}"
            raise HttpError(409, reason)
        if block_size < 1:
            raise HttpError(400, "block_size must be greater than 0")
        followed = self._instances.get(instance_id)
        if followed is not None and followed.place != place:
            raise HttpError(409, f"instance {instance_id} is registered for {shown(followed.place)}")
        if followed is not None and dp_rank in followed.listeners:
            raise HttpError(409, f"instance {instance_id} dp_rank {dp_rank} already registered")
        index = model.index if model is not None else KvIndex(self._blocks_max)
        try:
            engine = EngineEvents(
                instance_id, dp_rank, block_size, self._put(index), salt=salt, is_eagle=is_eagle, name=endpoint
            )
            listener = EngineListener(engine, endpoint, replay_endpoint=replay_endpoint, gate=self.gate)
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None
        if model is None:
            self.models[place] = IndexedModel(block_size, index)
        if followed is None:
            followed = self._instances[instance_id] = _Followed(place)
        task = self._tasks.start(listener.run(), f"instance {instance_id} rank {dp_rank}")
        followed.listeners[dp_rank] = (listener, task)

    def leave(self, instance_id: int, place: Place, dp_rank: int | None = None) -> None:
        """Stop following an instance, or one of its ranks, and drop its blocks. Raises `HttpError`."""
        followed = self._instances.get(instance_id)
        if followed is None:
            raise HttpError(404, f"instance {instance_id} not found")
        if followed.place != place:
            raise HttpError(404, f"instance {instance_id} is registered for {shown(followed.place)}")
        if dp_rank is not None and dp_rank not in followed.listeners:
            raise HttpError(404, f"instance {instance_id} dp_rank {dp_rank} not found")
        index = self.models[place].index
        for rank in list(followed.listeners) if dp_rank is None else [dp_rank]:
            followed.listeners.pop(rank)[1].cancel()
            index.clear(instance_id, rank)
        if not followed.listeners:
            del self._instances[instance_id]
            index.remove_worker(instance_id)

    def pause(self, instance_id: int, dp_rank: int) -> None:
        """Stop receiving a rank's events, and keep its blocks. Raises `HttpError` for an unknown rank."""
        listener, task = self._following(instance_id, dp_rank)
        task.cancel()
        listener.status = Status.PAUSED

    def resume(self, instance_id: int, dp_rank: int) -> None:
        """Receive a paused rank's events again; those missed are replayed. Raises `HttpError` for an unknown rank."""
        listener, task = self._following(instance_id, dp_rank)
        if task.done() or task.cancelling():
            task = self._tasks.start(listener.run(), f"instance {instance_id} rank {dp_rank}")
            self._instances[instance_id].listeners[dp_rank] = (listener, task)

    def _following(self, instance_id: int, dp_rank: int) -> tuple[EngineListener, asyncio.Task[None]]:
        followed = self._instances.get(instance_id)
        if followed is None or dp_rank not in followed.listeners:
            raise HttpError(404, f"instance {instance_id} dp_rank {dp_rank} not found")
        return followed.listeners[dp_rank]

    def workers(self, model_name: str | None = None, routing_group: str | None = None) -> list[ShownWorker]:
        """Return the followed instances, optionally of one model or group only."""
        found = []
        for instance_id, followed in sorted(self._instances.items()):
            if model_name not in (None, followed.place[0]) or routing_group not in (None, followed.place[1]):
                continue
            listeners = {
                str(rank): ShownListener(one.endpoint, one.status.value, one.error)
                for rank, (one, _) in sorted(followed.listeners.items())
            }
            statuses = {one.status for one, _ in followed.listeners.values()}
            found.append(
                ShownWorker(
                    instance_id=instance_id,
                    source="zmq",
                    status=next(status.value for status in STATUS_ORDER if status in statuses),
                    model_name=followed.place[0],
                    routing_group=followed.place[1],
                    block_size=self.models[followed.place].block_size,
                    endpoints={rank: one.endpoint for rank, one in listeners.items()},
                    listeners=listeners,
                )
            )
        return found

    def listeners(self) -> list[EngineListener]:
        """Return the listeners of all ranks."""
        return [one for followed in self._instances.values() for one, _ in followed.listeners.values()]

    # Cached blocks.

    def find(self, place: Place, blocks: bytes) -> Matches:
        """Return the cached tokens of a prompt by packed token hashes. Raises `HttpError` for an unknown model."""
        model = self.models.get(place)
        if model is None:
            raise HttpError(404, f"no indexer for {shown(place)}")
        return matches_of(tiers_of(model.index, blocks), model.block_size)

    def dump(self) -> dict[str, ModelDump]:
        """Return the dump of all models, by `model:group`."""
        return {
            f"{model}:{group}": ModelDump(one.block_size, events.dump(one.index))
            for (model, group), one in self.models.items()
        }

    async def load(self, dumped: Mapping[str, ModelDump]) -> int:
        """Apply a peer's dump and return its number of events. Models with a different block size are skipped."""
        count = 0
        for name, one in dumped.items():
            model_name, _, group = name.rpartition(":")
            place = (model_name, group)
            model = self.models.setdefault(place, IndexedModel(one.block_size, KvIndex(self._blocks_max)))
            if model.block_size != one.block_size:
                logger.warning(
                    "skipping %s of a peer's dump: block size %d differs from the local %d",
                    name,
                    one.block_size,
                    model.block_size,
                )
                continue
            for event in one.events:
                events.apply(model.index, event)
                count += 1
                if count % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
        return count

    def _put(self, index: KvIndex) -> Callable[[WorkerKvEvent], None]:
        def put(event: WorkerKvEvent) -> None:
            is_known = events.apply(index, event)
            if self._observe is not None:
                self._observe(event, is_known)

        return put


def tiers_of(index: KvIndex, blocks: bytes) -> dict[Rank, tuple[int, int, int]]:
    """Return the leading blocks of each rank: on its device, then additional ones in host memory, then on disk."""
    overlap = index.find(blocks)
    found: dict[Rank, tuple[int, int, int]] = {
        rank: (depth, 0, 0) for rank, depth in index.depth_by_rank(overlap).items()
    }
    for slot in slots_of(index.lower):
        rank = index.rank_at(slot)
        device = found.get(rank, (0, 0, 0))[0]
        host = index.beyond(overlap, slot, device, 1)
        disk = index.beyond(overlap, slot, device + host, 2)
        if device or host or disk:
            found[rank] = (device, host, disk)
    return found


def matches_of(tiers: Mapping[Rank, tuple[int, int, int]], block_size: int) -> Matches:
    """Convert blocks by rank to tokens by instance."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, Held] = {}
    for (instance_id, dp_rank), counts in sorted(tiers.items()):
        held = instances.setdefault(str(instance_id), Held(0, 0, {}, 0, 0))
        add_tiers(held, dp_rank, counts, block_size)
        if counts[0]:
            scores.setdefault(str(instance_id), {})[str(dp_rank)] = counts[0] * block_size
    return Matches(scores, [], instances)


def add_tiers(held: Held, dp_rank: int, counts: tuple[int, int, int], block_size: int) -> None:
    """Merge the counts of one more rank of an instance; the instance takes those of its best rank."""
    device, host, disk = (sum(counts[: tier + 1]) * block_size for tier in range(3))
    held.dp[str(dp_rank)] = device
    held.gpu, held.cpu, held.disk = max(held.gpu, device), max(held.cpu, host), max(held.disk, disk)
    held.longest_matched = max(held.longest_matched, disk)


def shown(place: Place) -> str:
    """Return a model and routing group for messages."""
    return f"model={place[0]} routing_group={place[1]}"
