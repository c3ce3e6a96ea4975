"""SlotTrackerOptions: the flags of `python -m dynamo.slot_tracker`."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.routing.sync.replica_peers import ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTrackerOptions(ReplicaOptions):
    """Standalone slot tracker: reports the load of every rank."""

    port: int = option(8091, "--port", None, "HTTP port")
