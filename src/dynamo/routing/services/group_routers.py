"""GroupRouters: the routers of a selection service, one for each model and routing group."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo.core.errors import HttpError
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import Router, WorkerFacts
from dynamo.routing.services.indexed_models import IndexedModels, Place, shown
from dynamo.routing.services.worker_catalog import WorkerRecord, check_event_endpoints, event_endpoints
from dynamo.routing.topology import topology_taint


@dataclass(slots=True)
class GroupRouter:
    """Router of one model and routing group."""

    block_size: int
    machine: Router


class GroupRouters:
    """Routers by model name and routing group."""

    def __init__(
        self,
        indexes: IndexedModels,
        rng: random.Random,
        *,
        use_kv_events: bool,
        affinity_ttl_s: float | None,
        replica_sync: bool,
    ) -> None:
        self.affinity_writer: int | None = None
        """Id under which this service binds sessions, if it has peers; set before the first worker."""
        self._indexes = indexes
        self._rng = rng
        self._use_kv_events = use_kv_events
        self._affinity_ttl_s = affinity_ttl_s
        self._replica_sync = replica_sync
        self._routers: dict[Place, GroupRouter] = {}

    def __getitem__(self, place: Place) -> GroupRouter:
        return self._routers[place]

    def get(self, place: Place) -> GroupRouter | None:
        """Return the router of a model and group; None if it has had no worker."""
        return self._routers.get(place)

    def sorted(self) -> Iterable[tuple[Place, GroupRouter]]:
        """Return all routers, sorted by model name and group."""
        return sorted(self._routers.items(), key=lambda item: item[0])

    # Workers.

    def admit(self, record: WorkerRecord, *, is_followed: bool) -> None:
        """Add a worker or update its facts; unless `is_followed`, its KV events are followed from now on.

        Raise `HttpError` (409) for another block size than that of the group, `InvalidArgument` for invalid endpoints.
        """
        place, size = (record.model_name, record.routing_group), record.block_size or 0
        known = self._indexes.models.get(place) if self._use_kv_events else self._routers.get(place)
        if known is not None and known.block_size != size:
            reason = f"block_size mismatch for {shown(place)}: existing={known.block_size} requested={size}"
            raise HttpError(409, reason)
        if self._use_kv_events and not is_followed:
            self._follow_events(record, place, size)
        router = self._routers.get(place)
        if router is None:
            router = self._routers[place] = self._new_router(place, size)
        router.machine.set_worker(
            WorkerFacts(
                record.worker_id,
                dp_start=record.data_parallel_start_rank or 0,
                dp_size=record.data_parallel_size or 1,
                kv_blocks=record.total_kv_blocks,
                batch_tokens=record.max_num_batched_tokens,
                taints=frozenset(record.taints).union(
                    topology_taint(domain, value) for domain, value in record.topology_domains.items()
                ),
            )
        )

    def _follow_events(self, record: WorkerRecord, place: Place, block_size: int) -> None:
        # Before the first rank is followed: a worker is followed whole or not at all.
        check_event_endpoints(record)
        for rank, endpoint in event_endpoints(record).items():
            assert endpoint is not None, "a worker without events is not schedulable"
            self._indexes.follow(
                record.worker_id,
                rank,
                endpoint,
                place,
                block_size,
                replay_endpoint=record.replay_endpoint,
                is_eagle=bool(record.is_eagle),
            )

    def _new_router(self, place: Place, block_size: int) -> GroupRouter:
        config = RoutingConfig(
            block_size=block_size,
            affinity_ttl_s=self._affinity_ttl_s,
            replica_sync=self._replica_sync,
            use_kv_events=self._use_kv_events,
        )
        index = self._indexes.models[place].index if self._use_kv_events else None
        machine = Router(config, self._rng, index=index)
        if machine.affinity is not None and self.affinity_writer is not None:
            machine.affinity.writer = self.affinity_writer
        return GroupRouter(block_size, machine)

    def remove(self, record: WorkerRecord) -> list[str]:
        """Remove a worker that was admitted; return the ids of its requests."""
        place = (record.model_name, record.routing_group)
        if self._use_kv_events:
            self._indexes.leave(record.worker_id, place)
        return self._routers[place].machine.remove_worker(record.worker_id)
