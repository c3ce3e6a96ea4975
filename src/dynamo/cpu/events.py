"""Events: reports to the routers: every block event in order, and the load at a limited rate."""

from collections.abc import Iterable

from dynamo.backend.engine import EngineHost
from dynamo.kvbm.logical.consolidator import TierEvent
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, WorkerLoad

LOAD_INTERVAL_S = 0.1  # Routers balance seconds of work; an event per token would only add cost.


class Reporter:
    """Publisher of KV events and load through the host, on the loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._published: WorkerLoad | None = None
        self._published_at = 0.0

    def report(
        self,
        events: list[KvEvent],
        load: WorkerLoad,
        now: float,
        *,
        is_idle: bool,
        passed: ForwardPass | None = None,
        tier_events: Iterable[TierEvent] = (),
    ) -> None:
        """Report after a step. The load is published if it changed and the interval has passed, or if the engine is idle."""
        for event in events:
            self._host.publish_kv_event(event)
        for event, tier in tier_events:
            self._host.publish_kv_event(event, tier=tier)
        if passed is not None:
            self._host.publish_forward_pass(passed)
        is_due = self._published is None or is_idle or now - self._published_at >= LOAD_INTERVAL_S
        if is_due and load != self._published:
            self._published, self._published_at = load, now
            self._host.publish_load(load)
