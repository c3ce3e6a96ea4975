"""Events: what the engine tells the routers: every block in order, and its load, but not after every step."""

from collections.abc import Iterable

from dynamo.backend.engine import EngineHost
from dynamo.kvbm.logical.consolidator import Told
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad

LOAD_INTERVAL_S = 0.1  # Routers choose between seconds of work; hearing of every token would only cost them.


class Reporter:
    """Speaks to the host, on the loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._told: WorkerLoad | None = None
        self._told_at = 0.0

    def report(
        self,
        events: list[KvEvent],
        load: WorkerLoad,
        now: float,
        *,
        is_idle: bool,
        passed: ForwardPass | None = None,
        told: Iterable[Told] = (),
    ) -> None:
        """After a step. The load is told when it changed and some time has passed, or when nothing will follow."""
        for event in events:
            self._host.publish_kv_event(event)
        for event, tier in told:
            self._host.publish_kv_event(event, tier=tier)
        if passed is not None:
            self._host.publish_forward_pass(passed)
        is_due = self._told is None or is_idle or now - self._told_at >= LOAD_INTERVAL_S
        if is_due and load != self._told:
            self._told, self._told_at = load, now
            self._host.publish_load(load)
