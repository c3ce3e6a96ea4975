"""SelectionService: upstream's worker selection without a runtime, for registered workers whose KV events are followed.

    upsert_worker({...}) · select({...}) · select_and_reserve({...}) · prefill_complete(id) · free_reservation(id)

`python -m dynamo.select_service` provides the same over HTTP. Requests and responses are plain JSON values.
"""

import asyncio
import contextlib
import logging
import math
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import HttpError, InvalidArgument, NotReady, Overloaded
from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.affinity import Version
from dynamo.kv_router.router import Decision, Router, RouteRequest
from dynamo.kv_router.runs import pack, unpack
from dynamo.kv_router.tracking import TrackingKey
from dynamo.protocols.active_sequences import AddedSequence
from dynamo.routing.endpoint_router import load_table, overlap_table
from dynamo.routing.services.group_routers import GroupRouter, GroupRouters
from dynamo.routing.services.indexed_models import Held, IndexedModels, Place, add_tiers, shown
from dynamo.routing.services.indexer_peers import Peers
from dynamo.routing.services.pending_selections import PendingSelections, SelectionCacheConfig
from dynamo.routing.services.selection_requests import (
    PromptBody,
    ReservationBody,
    failed,
    route_request_of,
    sequence_of,
)
from dynamo.routing.services.worker_catalog import (
    Catalog,
    WorkerBody,
    WorkerRecord,
    followed_as,
    plain,
    read,
)
from dynamo.routing.sync.replica_peers import ReplicaPeers
from dynamo.routing.topology import constraints_of
from dynamo.text.multimodal.routing_hashes import hashes_of
from dynamo.tokens.hashing import U64

logger = logging.getLogger(__name__)

AFFINITY_MAX_S = 31_536_000


def peers_of(urls: Sequence[str]) -> Peers:
    """Return the peers of an indexer. Raises `ValueError`."""
    try:
        return Peers(urls)
    except HttpError as error:
        raise ValueError(error.message) from None


class SelectionService:
    """Selection and booking of requests; responses are JSON values."""

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        session_affinity_ttl_secs: float | None = None,
        assume_kv_reuse: bool = True,
        tracking_key: TrackingKey | None = None,
        rng: random.Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Store the arguments and start. `indexer_threads` has no effect: one loop is faster than several threads.

        With `DYN_USE_KV_EVENTS` false, cached blocks are predicted from reservations and workers need no KV events.
        With a `tracking_key`, peers exchange active requests under hashes that require the key to compute.
        """
        if session_affinity_ttl_secs is not None and not 1 <= session_affinity_ttl_secs <= AFFINITY_MAX_S:
            raise ValueError(f"session_affinity_ttl_secs {session_affinity_ttl_secs}: expected 1 to {AFFINITY_MAX_S}")
        if replica_sync_peers and replica_sync_port is None:
            raise ValueError("replica_sync_peers requires replica_sync_port")
        self.models = IndexedModels()
        self._indexer_peers = peers_of(indexer_peers or ())
        self._clock = clock or SystemClock()
        use_kv_events = setting("DYN_USE_KV_EVENTS", True, read_bool)
        self._catalog = Catalog(requires_events=use_kv_events)
        self._routers = GroupRouters(
            self.models,
            rng or random.Random(random.getrandbits(64)),
            use_kv_events=use_kv_events,
            affinity_ttl_s=session_affinity_ttl_secs,
            replica_sync=replica_sync_port is not None,
        )
        self.peers: ReplicaPeers | None = None
        if replica_sync_port is not None:
            bindings = None if session_affinity_ttl_secs is None else self
            self.peers = ReplicaPeers(self, list(replica_sync_peers or ()), bindings=bindings)
            self._routers.affinity_writer = self.peers.router_id
        self._replica_sync_port = replica_sync_port
        self._pending = PendingSelections(selection_cache)
        self._reservations: dict[str, Place] = {}
        self._assume_kv_reuse = assume_kv_reuse
        self._key = tracking_key
        self._closing: asyncio.Task[None] | None = None
        self._tasks = TaskOwner("selection service")
        self._starting: asyncio.Task[None] | None = None
        with contextlib.suppress(RuntimeError):  # Without a running loop the first call that needs one starts it.
            asyncio.get_running_loop()
            self._ensure_started()

    async def start(self) -> None:
        """Return once the state of a peer is loaded, if one responds. Raises the error that prevented the start.

        A service that was created outside a running loop starts here, or with its first worker.
        """
        await asyncio.shield(self._ensure_started())

    def _ensure_started(self) -> "asyncio.Task[None]":
        if self._starting is None:
            self._starting = self._tasks.start(self._begin(), "start")
        return self._starting

    async def _begin(self) -> None:
        if self.peers is not None and self._replica_sync_port is not None:
            await self.peers.start(self._replica_sync_port)
        await self._indexer_peers.recover(self.models)
        self.models.gate.set()

    def shutdown(self) -> None:
        """Start closing; repeated calls have no effect."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.close(), name="selection service: end")

    async def shutdown_async(self) -> None:
        """Close and return once everything has ended."""
        self.shutdown()
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def close(self) -> None:
        """Close and wait for the end."""
        await self._tasks.cancel_and_wait()
        await self.models.close()
        if self.peers is not None:
            await self.peers.close()

    # Workers.

    async def upsert_worker(self, worker: Any) -> Any:
        """Register or replace a worker."""
        self._ensure_started()
        body = read(worker, WorkerBody)
        if isinstance(body.worker_id, UnsetType):
            raise InvalidArgument("worker_id is required", param="worker_id")
        return plain(self._set(body.worker_id, body))

    async def update_worker(self, worker_id: int, changes: Any) -> Any:
        """Change fields of a worker; null keeps a field, as in upstream."""
        before = self._catalog.records.get(worker_id)
        if before is None:
            raise failed("not_found", f"worker {worker_id} not found")
        if not isinstance(changes, Mapping):
            raise InvalidArgument("a worker update must be an object")
        known = {name: value for name, value in plain(before).items() if name in WorkerBody.__struct_fields__}
        known |= {name: value for name, value in changes.items() if value is not None}
        return plain(self._set(worker_id, read(known, WorkerBody)))

    async def delete_worker(self, worker_id: int) -> Any:
        """Remove a worker and its reservations."""
        record = self._catalog.records.pop(worker_id, None)
        if record is None:
            raise failed("not_found", f"worker {worker_id} not found")
        self._withdraw(record)
        record.lifecycle, record.not_schedulable_reasons = "unschedulable", UNSET
        return plain(record)

    async def patch_worker(self, worker_id: int, patch: Any) -> Any:
        """Change fields of a worker: upstream's name of `update_worker`."""
        return await self.update_worker(worker_id, patch)

    def list_workers(self, *, model_name: str | None = None, routing_group: str | None = None) -> Any:
        """Return the registered workers."""
        return plain(self._catalog.shown(model_name, routing_group))

    def ready(self) -> Any:
        """Return whether any worker is schedulable, and the records of all."""
        count = self._catalog.schedulable_count
        return {"ready": count > 0, "schedulable_workers": count, "workers": self.list_workers()}

    def _set(self, worker_id: int, body: WorkerBody) -> WorkerRecord:
        before = self._catalog.records.get(worker_id)
        record = self._catalog.record(worker_id, body)
        if before is not None and (not record.is_schedulable or followed_as(before) != followed_as(record)):
            self._withdraw(before)
            before = None
        if record.is_schedulable:
            try:
                self._routers.admit(record, is_followed=before is not None and before.is_schedulable)
            except (HttpError, InvalidArgument) as error:
                reason = error.message if isinstance(error, HttpError) else str(error)
                record.lifecycle, record.not_schedulable_reasons = "incomplete", [f"reconciliation failed: {reason}"]
        self._catalog.records[worker_id] = record
        return record

    def _withdraw(self, record: WorkerRecord) -> None:
        """Remove a worker from its router, with its reservations; no effect if it was not schedulable."""
        if record.is_schedulable:
            for request_id in self._routers.remove(record):
                self._reservations.pop(request_id, None)

    # Selections.

    async def overlap_scores(self, request: Any) -> Any:
        """Return the cached blocks of a prompt by rank and tier."""
        body = read(request, PromptBody)
        group = self._schedulable(body.model_name, body.routing_group)
        route_request = route_request_of(body, group.block_size)
        held = group.machine.overlaps(route_request.blocks, self._clock.now(), sequence=route_request.sequence)
        return overlap_table(held, group.machine.loads(), group.block_size, route_request.tokens)

    async def select(self, request: Any) -> Any:
        """Return the worker for a prompt. With a `selection_id`, the selection can be reserved for a limited time."""
        body = read(request, PromptBody)
        group, route_request = self._resolve(body)
        decision = self._decide(group, route_request, book=False)
        answer = self._answer(body, group, route_request, decision)
        if body.selection_id is not None:
            place, rank = (body.model_name, body.routing_group), (decision.worker_id, decision.dp_rank)
            self._pending.add(body.selection_id, place, rank, route_request, self._clock.now())
            return {"selection_id": body.selection_id, **answer}
        return answer

    async def select_and_reserve(self, request: Any) -> Any:
        """Select a worker and count the request there at once."""
        body = read(request, PromptBody)
        selection_id = body.selection_id or str(uuid.uuid4())
        self._must_be_free(selection_id)
        group, route_request = self._resolve(body)
        route_request.request_id = selection_id
        decision = self._decide(group, route_request, book=False)
        answer = self._answer(body, group, route_request, decision)
        self._reserve(selection_id, (body.model_name, body.routing_group), group, route_request, decision)
        sequence = [one - (1 << 64) if one >> 63 else one for one in unpack(route_request.sequence or b"")]
        return {
            "selection_id": selection_id,
            "sequence_hashes": sequence,
            "isl_tokens": route_request.tokens,
            "track_prefill_tokens": decision.snapshot.weights.track_prefill_tokens,
            **answer,
        }

    async def create_reservation(self, request: Any) -> Any:
        """Reserve an earlier selection, or count a request on a worker that the caller chose."""
        body = read(request, ReservationBody)
        place, now = (body.model_name, body.routing_group), self._clock.now()
        if body.worker_id is not None:
            return self._reserve_explicitly(body, body.worker_id, place, now)
        pending = self._pending.find(body.selection_id, place, now)
        if pending is None:
            reason = f"no pending selection {body.selection_id} for {shown(place)} (expired, already used, or never selected)"
            raise failed("not_found", reason)
        self._must_be_free(body.selection_id)
        self._pending.remove(body.selection_id, place)
        group = self._routers[place]
        pending.route_request.request_id = body.selection_id
        if not group.machine.book(body.selection_id, pending.rank, pending.route_request, now):
            raise failed("not_found", f"schedulable worker {pending.rank[0]} not found for {shown(place)}")
        self._booked(body.selection_id, pending.rank, place, group, pending.route_request.sequence)
        return self._reservation(body.selection_id, place, pending.rank)

    async def prefill_complete(self, selection_id: str) -> None:
        """Record the first token of a reservation's request."""
        place, machine = self._reserved(selection_id)
        rank = machine.rank_of(selection_id)
        machine.prefilled(selection_id)
        if self.peers is not None and rank is not None:
            self.peers.prefilled(selection_id, rank, place)

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """Record another full output block of a reservation's request."""
        if decay_fraction is not None and not 0 <= decay_fraction <= 1:
            raise failed("invalid_request", "decay_fraction must be between 0.0 and 1.0")
        _, machine = self._reserved(selection_id)
        machine.active.grow(selection_id, decay_fraction)

    async def free_reservation(self, selection_id: str) -> None:
        """Record the end of a reservation's request."""
        place, machine = self._reserved(selection_id)
        rank = machine.rank_of(selection_id)
        del self._reservations[selection_id]
        machine.finish(selection_id, self._clock.now())
        if self.peers is not None and rank is not None:
            self.peers.freed(selection_id, rank, place)

    def loads(self, *, model_name: str | None = None, routing_group: str | None = None) -> Any:
        """Return the load of every rank of every model."""
        now = self._clock.now()
        found = []
        for place, group in self._routers.sorted():
            if model_name in (None, place[0]) and routing_group in (None, place[1]):
                self._expire_requests(group, now)
                row = {"model_name": place[0], "routing_group": place[1], "loads": load_table(group.machine.loads())}
                found.append({**row, "pending_count": 0, "pending_isl_tokens": 0})
        return found

    async def potential_loads(self, request: Any) -> Any:
        """Return the load of every rank including a prompt."""
        body = read(request, PromptBody)
        group = self._schedulable(body.model_name, body.routing_group)
        route_request = route_request_of(body, group.block_size)
        route_request.sequence = sequence_of(body, group.block_size, route_request.blocks, self._key)
        return load_table(group.machine.potential(route_request, self._clock.now()))

    def dump(self) -> Any:
        """Return the dump of all indexes."""
        return self.models.dump()

    async def indexer_snapshot(self) -> Any:
        """Return the dump of all indexes: upstream's name of `dump`."""
        return plain(self.dump())

    async def recover_indexer_from_peers(self, peers: Sequence[str]) -> bool:
        """Load the indexes of the first of these URLs that responds; return False if none does."""
        valid = Peers()
        for url in peers:
            try:
                valid.add(url)
            except HttpError as error:
                logger.warning("skipping indexer peer %s: %s", url, error.message)
        return await valid.recover(self.models)

    # Replicas of this service.

    async def register_replica_peer(self, endpoint: str) -> bool:
        """Subscribe to a replica at `tcp://host:port`; return False if already subscribed. Raise `HttpError`."""
        return self._replicas().add_peer(endpoint)

    async def deregister_replica_peer(self, endpoint: str) -> bool:
        """Unsubscribe from a replica; return False if not subscribed. Raise `HttpError` without replica sync."""
        return self._replicas().remove_peer(endpoint)

    def list_replica_peers(self) -> list[str]:
        """Return the endpoints of the replicas."""
        return [] if self.peers is None else self.peers.peers

    def _replicas(self) -> ReplicaPeers:
        if self.peers is None:
            raise HttpError(409, "replica sync is disabled")
        return self.peers

    # Implementation.

    def _schedulable(self, model_name: str, routing_group: str) -> GroupRouter:
        if not self._catalog.schedulable_count:
            raise failed("not_ready", "no schedulable workers are available")
        place = (model_name, routing_group)
        group = self._routers.get(place)
        if group is None or not group.machine.workers:
            raise failed("not_ready", f"no schedulable workers for {shown(place)}")
        return group

    def _resolve(self, body: PromptBody) -> tuple[GroupRouter, RouteRequest]:
        group = self._schedulable(body.model_name, body.routing_group)
        route_request = route_request_of(body, group.block_size)
        route_request.allowed = None if body.allowed_worker_ids is None else frozenset(body.allowed_worker_ids)
        route_request.overrides = dict(body.router_config_override or {})
        route_request.overrides.setdefault("assume_kv_reuse", self._assume_kv_reuse)
        route_request.session, route_request.expected_output_tokens = body.session_id, body.expected_output_tokens
        route_request.priority_jump, route_request.strict_priority = body.priority_jump, body.strict_priority
        route_request.sequence = sequence_of(body, group.block_size, route_request.blocks, self._key)
        try:
            route_request.required_taints, route_request.preferred_taints = constraints_of(body.routing_constraints)
        except InvalidArgument as error:
            raise failed("invalid_request", str(error)) from None
        return group, route_request

    def _decide(self, group: GroupRouter, route_request: RouteRequest, *, book: bool) -> Decision:
        try:
            decision = group.machine.place(route_request, self._clock.now(), book=book)
        except NotReady:
            raise failed("not_ready", "no endpoints available to route work") from None
        except Overloaded as error:
            raise failed("overloaded", str(error)) from None
        except InvalidArgument as error:
            raise failed("invalid_request", str(error)) from None
        assert decision is not None, "without a queue threshold, no decision waits"
        return decision

    def _answer(
        self, body: PromptBody, group: GroupRouter, route_request: RouteRequest, decision: Decision
    ) -> dict[str, Any]:
        machine, size = group.machine, group.block_size
        tiers = machine.overlaps(route_request.blocks, self._clock.now(), sequence=route_request.sequence)
        held = Held(0, 0, {}, 0, 0)
        for rank in sorted(machine.loads()):
            if rank[0] == decision.worker_id:
                add_tiers(held, rank[1], tiers.get(rank, (0, 0, 0)), size)
        chosen = (decision.worker_id, decision.dp_rank)
        blocks = machine.potential(route_request, self._clock.now())[chosen][1]
        return {
            "model_name": body.model_name,
            "routing_group": body.routing_group,
            "worker_id": decision.worker_id,
            "dp_rank": decision.dp_rank,
            "endpoint": self._catalog.records[decision.worker_id].endpoint,
            "block_size": size,
            "overlap": plain(held),
            "effective_prefill_tokens": machine.effective_tokens(decision),
            "potential_decode_blocks": math.ceil(blocks) + (1 if route_request.tokens % size else 0),
        }

    def _reserve(
        self, selection_id: str, place: Place, group: GroupRouter, route_request: RouteRequest, decision: Decision
    ) -> None:
        rank = (decision.worker_id, decision.dp_rank)
        group.machine.commit(route_request, decision, self._clock.now())
        self._booked(selection_id, rank, place, group, route_request.sequence)
        affinity = group.machine.affinity
        if self.peers is not None and affinity is not None and route_request.session is not None:
            version = affinity.version_of(route_request.session)
            if version is not None:
                self.peers.bound(route_request.session, rank, place, version)

    def _reserve_explicitly(self, body: ReservationBody, worker_id: int, place: Place, now: float) -> dict[str, Any]:
        group = self._routers.get(place)
        if group is None or worker_id not in group.machine.workers:
            raise failed("not_found", f"schedulable worker {worker_id} not found for {shown(place)}")
        if body.sequence_hashes is not None:
            sequence = pack([one & U64 for one in body.sequence_hashes])
        elif body.token_ids is not None:
            hashes = hashes_of(body.token_ids, group.block_size, lora_name=body.lora_name, cache_salt=body.cache_salt)
            sequence = sequence_of(body, group.block_size, pack(hashes), self._key)
        else:
            raise failed("invalid_request", "sequence_hashes is required without token_ids")
        self._must_be_free(body.selection_id)
        rank = (worker_id, group.machine.workers[worker_id].dp_start if body.dp_rank is None else body.dp_rank)
        if not group.machine.has_rank(rank):
            raise failed("not_found", f"Worker {rank[0]}, dp_rank {rank[1]} not found")
        self._pending.remove(body.selection_id, place)
        group.machine.share(body.selection_id, rank, sequence, body.effective_prefill_tokens, now)
        self._booked(body.selection_id, rank, place, group, sequence)
        return self._reservation(body.selection_id, place, rank)

    def _booked(
        self, selection_id: str, rank: tuple[int, int], place: Place, group: GroupRouter, sequence: bytes | None
    ) -> None:
        self._reservations[selection_id] = place
        if self.peers is not None:
            tokens = group.machine.active.prefill_of(selection_id)
            self.peers.added(selection_id, rank, place, unpack(sequence or b""), tokens)

    def _reservation(self, selection_id: str, place: Place, rank: tuple[int, int]) -> dict[str, Any]:
        return {
            "selection_id": selection_id,
            "model_name": place[0],
            "routing_group": place[1],
            "worker_id": rank[0],
            "dp_rank": rank[1],
            "endpoint": self._catalog.records[rank[0]].endpoint,
        }

    def _reserved(self, selection_id: str) -> tuple[Place, Router]:
        place = self._reservations.get(selection_id)
        if place is None:
            raise failed("not_found", f"reservation {selection_id} not found")
        group = self._routers[place]
        self._expire_requests(group, self._clock.now())
        if selection_id not in self._reservations:
            raise failed("not_found", f"reservation {selection_id} not found")
        return place, group.machine

    def _expire_requests(self, group: GroupRouter, now: float) -> None:
        for request_id in group.machine.expire(now):
            self._reservations.pop(request_id, None)

    def _must_be_free(self, selection_id: str) -> None:
        if selection_id in self._reservations:
            raise failed("conflict", f"selection {selection_id} is already reserved or being reserved")

    # Events of peers (`routing.sync.replica_peers`).

    def block_size(self, place: Place) -> int:
        """Return the block size of a model's workers; 0 for an unknown model."""
        group = self._routers.get(place)
        return 0 if group is None else group.block_size

    def replica_added(self, request_id: str, rank: tuple[int, int], place: Place, added: AddedSequence) -> None:
        """Count a request that a peer placed; one of an unknown model or rank is ignored."""
        group = self._routers.get(place)
        if group is None:
            return
        hint = added.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint is not None and added.track_prefill_tokens else 0
        sequence = pack(added.token_sequence or ())
        group.machine.share(request_id, rank, sequence, tokens, self._clock.now())

    def replica_bound(self, session: str, rank: tuple[int, int], place: Place, version: Version) -> None:
        """Apply a peer's session binding; one of an unknown model or rank is ignored."""
        group = self._routers.get(place)
        if group is not None:
            group.machine.bind(session, rank, version, self._clock.now())

    def replica_prefilled(self, request_id: str, place: Place) -> None:
        """Record the first token of a peer's request."""
        group = self._routers.get(place)
        if group is not None:
            group.machine.prefilled(request_id)

    def replica_freed(self, request_id: str, place: Place) -> None:
        """Record the end of a peer's request."""
        group = self._routers.get(place)
        if group is not None:
            group.machine.finish(request_id, self._clock.now())
