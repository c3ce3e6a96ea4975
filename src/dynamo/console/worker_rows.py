"""Worker rows: what discovery, model cards, routers and the workers' own control report about each worker."""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.protocols.discovery import INSTANCES, EndpointId
from dynamo.protocols.worker_control import WORKER_CONTROL
from dynamo.serving.direct_calls import DirectCalls, instances_of
from dynamo.serving.models import Models
from dynamo.serving.recent_requests import WorkerError
from dynamo.serving.served_model import ServedModel

WORKERS_MAX = 256
"""Workers whose control is called, in the order of their names; more are shown without their own status."""
CLIENTS_MAX = 32
"""Components whose clients are kept."""
CONCURRENT_CALLS = 16

Key = tuple[str, str, int]
"""Namespace, component and instance id."""


class RankRow(msgspec.Struct, kw_only=True):
    """Load of one rank, in KV blocks and requests; None if unknown."""

    dp_rank: int = 0
    kv_used: float | None = None
    kv_total: int | None = None
    hit_rate: float | None = None
    running: int | None = None
    waiting: int | None = None
    prefill_tokens: float | None = None
    """Prompt tokens that wait for their computation."""
    cached_blocks: int | None = None
    """Blocks in the router's index, in all tiers."""


class WorkerRow(msgspec.Struct, kw_only=True):
    """One worker."""

    id: str
    """Instance id in hexadecimal."""
    namespace: str
    component: str
    models: list[str] = []
    role: str = ""
    state: str = "serving"
    """`serving`, `draining`, `drained` or `stopping`; `unresponsive` for one that failed a moment ago or does not reply."""
    address: str = ""
    host: str = ""
    engine: str = ""
    version: str = ""
    started_at: float | None = None
    in_flight: int = 0
    ranks: list[RankRow] = []
    is_controllable: bool = False
    """Whether it serves the control endpoint; released workers do not."""
    control_error: str = ""
    last_error: WorkerError | None = None

    def usage(self) -> tuple[float, float]:
        """Return the used and the existing KV blocks of the ranks that report both."""
        known = [one for one in self.ranks if one.kv_used is not None and one.kv_total]
        return sum(one.kv_used or 0.0 for one in known), float(sum(one.kv_total or 0 for one in known))


class WorkerRows:
    """Reader of the state of all workers of one frontend."""

    def __init__(self, models: Models, errors: Mapping[int, WorkerError]) -> None:
        self._models = models
        self._errors = errors
        self._calls = DirectCalls(models.runtime, CLIENTS_MAX)
        self._limit = asyncio.Semaphore(CONCURRENT_CALLS)
        self._statuses: dict[Key, dict[str, Any]] = {}
        self._seen: dict[Key, WorkerRow] = {}
        """Last row of each worker that discovery listed, for drained ones, which it lists no longer."""

    async def refresh(self) -> None:
        """Call the control of every worker."""
        keys = await self._models.runtime.discovery.snapshot(INSTANCES)
        found = sorted(
            instances_of(keys, WORKER_CONTROL), key=lambda one: (one[0].namespace, one[0].component, one[1])
        )[:WORKERS_MAX]
        replies = await asyncio.gather(*(self.call(endpoint, instance_id, "status") for endpoint, instance_id in found))
        self._statuses = {
            (endpoint.namespace, endpoint.component, instance_id): reply
            for (endpoint, instance_id), reply in zip(found, replies, strict=True)
        }

    async def call(self, endpoint: EndpointId, instance_id: int, action: str) -> dict[str, Any]:
        """Return the reply of a worker's control to an action."""
        async with self._limit:
            return await self._calls.call(endpoint, instance_id, {"action": action})

    def rows(self) -> list[WorkerRow]:
        """Return a row for every worker, by namespace, component and id."""
        rows: dict[Key, WorkerRow] = {}
        for served in self._models.every_set():
            self._add_set(rows, served)
        for key, status in self._statuses.items():
            row = rows.get(key)
            if row is None:
                row = rows[key] = self._absent(key)
            _add_status(row, status)
        self._seen = dict(rows)
        return [row for _, row in sorted(rows.items())]

    async def close(self) -> None:
        """Close the clients."""
        await self._calls.close()

    def _add_set(self, rows: dict[Key, WorkerRow], served: ServedModel) -> None:
        """Add the workers of a model's set."""
        unsound = served.client.unsound()
        loads = _router_loads(served)
        serving = set(served.worker_ids())
        for instance in served.client.instances():
            key = (instance.namespace, instance.component, instance.instance_id)
            row = rows.get(key)
            if row is None:
                row = rows[key] = WorkerRow(
                    id=f"{instance.instance_id:x}",
                    namespace=instance.namespace,
                    component=instance.component,
                    role=served.worker_type,
                    address=instance.transport.address.partition("/")[0],
                    last_error=self._errors.get(instance.instance_id),
                )
            if instance.instance_id in unsound:
                row.state = "unresponsive"
            if instance.instance_id in serving:
                row.models.append(served.name)
            row.in_flight = max(row.in_flight, served.client.inflight(instance.instance_id))
            row.ranks = row.ranks or loads.get(instance.instance_id) or _card_ranks(served, instance.instance_id)

    def _absent(self, key: Key) -> WorkerRow:
        """Return the row of a worker that serves no model at the moment."""
        seen = self._seen.get(key)
        row = WorkerRow(id=f"{key[2]:x}", namespace=key[0], component=key[1], last_error=self._errors.get(key[2]))
        if seen is not None:
            row.models, row.role, row.address = seen.models, seen.role, seen.address
        return row


def _router_loads(served: ServedModel) -> dict[int, list[RankRow]]:
    """Return the load of each worker as its KV router counts it; empty without one."""
    if served.kv is None:
        return {}
    served.kv.refresh()
    machine = served.kv.machine
    found: dict[int, list[RankRow]] = {}
    for (worker_id, dp_rank), (tokens, blocks, requests) in sorted(machine.loads().items()):
        facts = machine.workers.get(worker_id)
        rank = RankRow(
            dp_rank=dp_rank,
            kv_used=blocks,
            kv_total=None if facts is None else facts.kv_blocks,
            running=requests,
            prefill_tokens=tokens,
            cached_blocks=machine.index.held(worker_id, dp_rank),
        )
        found.setdefault(worker_id, []).append(rank)
    return found


def _card_ranks(served: ServedModel, instance_id: int) -> list[RankRow]:
    """Return the ranks that a worker's card describes, without load."""
    card = served.card_of(instance_id)
    if card is None:
        return []
    runtime = card.runtime_config
    first = runtime.data_parallel_start_rank
    ranks = range(first, first + max(1, runtime.data_parallel_size))
    return [RankRow(dp_rank=rank, kv_total=runtime.total_kv_blocks) for rank in ranks]


def _add_status(row: WorkerRow, status: Mapping[str, Any]) -> None:
    """Add the worker's own status to its row."""
    if "error" in status:
        row.control_error = str(status["error"])
        row.state = "unresponsive"
        return
    row.is_controllable = True
    if row.state != "unresponsive" or status.get("state") != "serving":
        row.state = str(status.get("state", row.state))
    row.role = row.role or str(status.get("role", ""))
    row.models = row.models or [str(status["model"])] if status.get("model") else row.models
    row.host, row.engine = str(status.get("host", "")), str(status.get("engine", ""))
    row.version, row.started_at = str(status.get("version", "")), status.get("started_at")
    row.in_flight = int(status.get("inflight_requests", row.in_flight))
    known = {one.dp_rank: one for one in row.ranks}
    for load in status.get("ranks", ()):
        rank = known.setdefault(int(load["dp_rank"]), RankRow(dp_rank=int(load["dp_rank"])))
        rank.kv_used, rank.kv_total = load["kv_used_blocks"], load["kv_total_blocks"] or rank.kv_total
        rank.running, rank.waiting = load["running_requests"], load["waiting_requests"]
        rank.hit_rate = load["cache_hit_rate"]
        if load["active_prefill_tokens"] is not None and rank.prefill_tokens is None:
            rank.prefill_tokens = load["active_prefill_tokens"]
    row.ranks = [known[rank] for rank in sorted(known)]
