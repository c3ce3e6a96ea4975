"""Worker catalog: registered workers of a selection service, and why some of them are not schedulable."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.engine_subscriber import check_endpoint

DEFAULT = "default"

Id = Annotated[int, msgspec.Meta(ge=0)]
Signed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
B = TypeVar("B")


class WorkerBody(msgspec.Struct, kw_only=True):
    """Worker registration. A change keeps the omitted fields."""

    worker_id: Id | UnsetType = UNSET
    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[Id, str] | UnsetType | None = UNSET
    """Address of the KV events of each rank."""
    replay_endpoint: str | None = None
    block_size: Id | None = None
    data_parallel_start_rank: Id | None = None
    data_parallel_size: Id | None = None
    max_num_batched_tokens: Id | None = None
    total_kv_blocks: Id | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: list[str] = msgspec.field(default_factory=list)
    topology_domains: dict[str, str] = msgspec.field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None
    router_hint_worker_type: str | UnsetType | None = UNSET
    router_hint_source_control_endpoints: dict[Id, str] | UnsetType | None = UNSET
    kv_event_source_mode: str | UnsetType | None = UNSET


class WorkerRecord(msgspec.Struct, kw_only=True):
    """Registered worker, as returned by the API."""

    worker_id: int
    model_name: str
    routing_group: str
    lifecycle: str
    """`schedulable`, `incomplete`, or `unschedulable` for a removed worker."""
    endpoint: str | None
    kv_events_endpoint: str | None
    kv_events_endpoints: dict[Id, str] | UnsetType = UNSET
    replay_endpoint: str | None
    block_size: int | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    stable_routing_id: str | None
    is_eagle: bool | None
    taints: list[str]
    topology_domains: dict[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    router_hint_worker_type: str | UnsetType = UNSET
    router_hint_source_control_endpoints: dict[Id, str] | UnsetType = UNSET
    kv_event_source_mode: str | UnsetType = UNSET
    not_schedulable_reasons: list[str] | UnsetType = UNSET

    @property
    def is_schedulable(self) -> bool:
        """Return whether requests may be sent to this worker."""
        return self.lifecycle == "schedulable"


OMITTED = (
    "kv_events_endpoints",
    "router_hint_worker_type",
    "router_hint_source_control_endpoints",
    "kv_event_source_mode",
)
"""Fields that a record omits where the registration has no value; the others are null."""


class Catalog:
    """Registered workers, and the reasons why some are not schedulable."""

    def __init__(self, *, requires_events: bool = True) -> None:
        self.records: dict[int, WorkerRecord] = {}
        self._requires_events = requires_events

    @property
    def schedulable_count(self) -> int:
        """Return the number of schedulable workers."""
        return sum(record.is_schedulable for record in self.records.values())

    def record(self, worker_id: int, body: WorkerBody) -> WorkerRecord:
        """Return the record of a worker, with its lifecycle and the missing fields."""
        fields = {name: getattr(body, name) for name in body.__struct_fields__ if name != "worker_id"}
        fields |= {name: UNSET for name in OMITTED if not fields[name]}
        fields["taints"] = sorted(set(body.taints))
        record = WorkerRecord(worker_id=worker_id, lifecycle="schedulable", **fields)
        if reasons := self._missing(record):
            record.lifecycle, record.not_schedulable_reasons = "incomplete", reasons
        return record

    def shown(self, model_name: str | None, routing_group: str | None) -> list[WorkerRecord]:
        """Return the records of a model and routing group; None: of all."""
        return [
            record
            for _, record in sorted(self.records.items())
            if model_name in (None, record.model_name) and routing_group in (None, record.routing_group)
        ]

    def _missing(self, record: WorkerRecord) -> list[str]:
        """Return what a record lacks to be schedulable, in upstream's words and order."""
        checks = (
            (not record.endpoint, "endpoint is required"),
            (not record.block_size, "block_size must be greater than 0"),
            (record.data_parallel_size == 0, "data_parallel_size must be greater than 0"),
        )
        reasons = [reason for is_missing, reason in checks if is_missing]
        reasons += [
            f"kv_events endpoint is required for dp_rank {rank}"
            for rank, endpoint in event_endpoints(record).items()
            if not endpoint and self._requires_events
        ]
        if record.replay_endpoint is not None and (record.data_parallel_size or 1) != 1:
            reasons.append("replay_endpoint is supported only for data_parallel_size 1")
        return reasons


def event_endpoints(record: WorkerRecord) -> dict[int, str | None]:
    """Return the KV event endpoint of each rank; None if it is missing."""
    start = record.data_parallel_start_rank or 0
    size = 1 if record.data_parallel_size is None else record.data_parallel_size
    by_rank = record.kv_events_endpoints if isinstance(record.kv_events_endpoints, dict) else {}
    only = record.kv_events_endpoint if size == 1 else None
    return {rank: by_rank.get(rank, only) for rank in range(start, start + size)}


def check_event_endpoints(record: WorkerRecord) -> None:
    """Raise `InvalidArgument` for an address that no listener of this worker could use."""
    named = {
        f"kv_events endpoint for worker {record.worker_id} dp_rank {rank}": endpoint
        for rank, endpoint in event_endpoints(record).items()
    }
    for name, endpoint in (*named.items(), (f"replay endpoint for worker {record.worker_id}", record.replay_endpoint)):
        try:
            if endpoint is not None:
                check_endpoint(endpoint)
        except InvalidArgument as error:
            raise InvalidArgument(f"invalid {name}: {error}") from None


def followed_as(record: WorkerRecord) -> tuple[Any, ...]:
    """Return the fields of a record whose change requires new listeners."""
    return (
        record.model_name,
        record.routing_group,
        record.block_size,
        record.replay_endpoint,
        record.is_eagle,
        event_endpoints(record),
    )


def read(value: Any, kind: type[B]) -> B:
    """Convert a JSON value, or return an already converted one. Raises `InvalidArgument`."""
    if isinstance(value, kind):
        return value
    try:
        return msgspec.convert(value, kind, str_keys=True)  # Numbers as keys: text in JSON, numbers from Python.
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(str(error)) from None


def plain(value: Any) -> Any:
    """Convert to a value of Python's built-in types."""
    return msgspec.to_builtins(value)
