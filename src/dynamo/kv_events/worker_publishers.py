"""Worker publishers: a worker's KV cache events and load, batched for routers.

Both collect the changes of one turn of the loop and send them in one message, so that an engine may call them in every
step. They write bytes to a function and do not depend on the event plane that carries them.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from dynamo.core.codec import msgpack_encode
from dynamo.protocols.kv_events import KvEvent, KvEventData, NumberedKvEvent, Removed, Stored, WorkerKvEvent
from dynamo.protocols.load import KvMetrics, WorkerLoad

KV_EVENTS_TOPIC = "kv-events"
KV_METRICS_TOPIC = "kv_metrics"

EVENTS_MAX = 1024  # In one message: a long prompt's blocks are one event, so this is many steps of many requests.
LOAD_INTERVAL_S = 0.1  # A wake-up costs more than the message; routers count the requests they place in between.

LOAD_REPEAT_S = 5.0  # Events may be lost; a subscriber that lost one, or is new, is up to date after this time.

Publish = Callable[[bytes], None]
"""Function that sends one message of a topic. Must not block."""


OnKvEvent = Callable[[WorkerKvEvent], None]
"""Callback that receives an event before it is sent."""


class WorkerKvEventPublisher:
    """Number the events of each rank and send them in order."""

    def __init__(self, publish: Publish, worker_id: int, on_event: OnKvEvent | None = None) -> None:
        self._publish = publish
        self._worker_id = worker_id
        self._on_event = on_event
        self._last_ids: dict[int, int] = {}
        self._pending: list[WorkerKvEvent] = []
        self._is_scheduled = False

    def put(self, event: KvEvent, dp_rank: int = 0, tier: str = "device") -> None:
        """Queue an event, which is sent with the loop's next turn."""
        event_id = self._last_ids.get(dp_rank, 0) + 1
        self._last_ids[dp_rank] = event_id
        numbered = NumberedKvEvent(event_id, event_data(event), dp_rank)
        kv_event = WorkerKvEvent(self._worker_id, tier, "worker", numbered)
        if self._on_event is not None:
            self._on_event(kv_event)
        self._pending.append(kv_event)
        if len(self._pending) >= EVENTS_MAX:
            self.flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send queued events."""
        self._is_scheduled = False
        if self._pending:
            pending, self._pending = self._pending, []
            self._publish(msgpack_encode(pending))


class WorkerLoadPublisher:
    """Send the newest load of each rank after a change, at most once per interval, and repeat it periodically.

    The last load is always sent.
    """

    def __init__(
        self, publish: Publish, worker_id: int, interval_s: float = LOAD_INTERVAL_S, repeat_s: float = LOAD_REPEAT_S
    ) -> None:
        self._publish = publish
        self._worker_id = worker_id
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self._newest: dict[int, WorkerLoad] = {}
        self._sent: dict[int, WorkerLoad] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._repeat_timer: asyncio.TimerHandle | None = None

    def put(self, load: WorkerLoad) -> None:
        """Send a load immediately if nothing was sent for an interval, else at its end unless replaced."""
        sent = self._sent.get(load.dp_rank)
        if load.dp_rank not in self._newest and sent is not None and _key(sent) == _key(load):
            return
        self._newest[load.dp_rank] = load
        if self._timer is None:
            self.flush()
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._interval_over)
        if self._repeat_timer is None:
            self._repeat_timer = asyncio.get_running_loop().call_later(self._repeat_s, self._repeat)

    def flush(self) -> None:
        """Send queued loads."""
        newest, self._newest = self._newest, {}
        self._sent.update(newest)
        self._send(newest.values())

    def _send(self, loads: Iterable[WorkerLoad]) -> None:
        for load in loads:
            metrics = KvMetrics(
                worker_id=self._worker_id,
                dp_rank=load.dp_rank,
                active_decode_blocks=load.active_decode_blocks,
                active_prefill_tokens=load.active_prefill_tokens,
                kv_used_blocks=load.kv_used_blocks,
            )
            self._publish(msgpack_encode(metrics))

    def close(self) -> None:
        """Send queued loads and stop the timers."""
        for timer in (self._timer, self._repeat_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._repeat_timer = None
        self.flush()

    def _repeat(self) -> None:
        """Resend the loads: a frontend that lost the last message before a pause would treat an idle worker as busy."""
        self._send(self._sent.values())
        self._repeat_timer = asyncio.get_running_loop().call_later(self._repeat_s, self._repeat)

    def _interval_over(self) -> None:
        self._timer = None
        if self._newest:
            self.flush()
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._interval_over)


def _key(load: WorkerLoad) -> tuple[int | None, ...]:
    return load.kv_used_blocks, load.active_decode_blocks, load.active_prefill_tokens


def event_data(event: KvEvent) -> KvEventData | Literal["cleared"]:
    """Return the wire form of an event."""
    if isinstance(event, Stored):
        return KvEventData(stored=event)
    if isinstance(event, Removed):
        return KvEventData(removed=event)
    return "cleared"
