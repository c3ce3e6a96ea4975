"""FpmDirectPublisher and FpmEventSubscriber: forward-pass metrics under upstream's names."""

import asyncio
import queue
from collections.abc import AsyncIterator

from dynamo.core.codec import UNREADABLE, msgpack_decoder
from dynamo.core.errors import InvalidArgument
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC, ForwardPassPublisher
from dynamo.kv_events.publisher import LatePublisher, LoopThread
from dynamo.protocols.load import ForwardPass, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.runtime.component import Endpoint
from dynamo.runtime.event_plane.base import Event

UNREAD_MAX = 10_000  # Messages: ten seconds of an engine with a thousand steps per second while the reader hangs.

read_metrics = msgpack_decoder(ForwardPassMetrics).decode

RankKey = tuple[str, int]
"""Worker id and data-parallel rank."""


class FpmDirectPublisher:
    """Publisher for an engine that counts its own steps. Heartbeats are automatic; any thread may publish."""

    def __init__(self, endpoint: Endpoint, worker_id: str, dp_size: int = 1) -> None:
        if dp_size < 1:
            raise InvalidArgument(f"dp_size {dp_size}: expected 1 or more", param="dp_size")
        self._ranks = dp_size
        self._thread = LoopThread()
        self._tasks = endpoint.runtime.tasks
        self._late = LatePublisher(endpoint, FORWARD_PASS_TOPIC)
        self._passes = ForwardPassPublisher(self._late.publish, worker_id, dp_size)
        self._is_closed = False

    def publish(
        self,
        *,
        dp_rank: int,
        scheduled_num_prefill_requests: int,
        scheduled_sum_prefill_tokens: int,
        scheduled_sum_prefill_kv_tokens: int,
        scheduled_num_decode_requests: int,
        scheduled_sum_decode_kv_tokens: int,
        queued_num_prefill_requests: int,
        queued_sum_prefill_tokens: int,
        queued_num_decode_requests: int,
        queued_sum_decode_kv_tokens: int,
        wall_time_secs: float,
    ) -> None:
        """Publish one step of one rank. Raise `InvalidArgument` for an unknown rank."""
        if not 0 <= dp_rank < self._ranks:
            raise InvalidArgument(f"dp_rank {dp_rank}: must be below {self._ranks}", param="dp_rank")
        passed = ForwardPass(
            wall_time_secs,
            ScheduledRequests(
                num_prefill_requests=scheduled_num_prefill_requests,
                sum_prefill_tokens=scheduled_sum_prefill_tokens,
                sum_prefill_kv_tokens=scheduled_sum_prefill_kv_tokens,
                num_decode_requests=scheduled_num_decode_requests,
                sum_decode_kv_tokens=scheduled_sum_decode_kv_tokens,
            ),
            QueuedRequests(
                num_prefill_requests=queued_num_prefill_requests,
                sum_prefill_tokens=queued_sum_prefill_tokens,
                num_decode_requests=queued_num_decode_requests,
                sum_decode_kv_tokens=queued_sum_decode_kv_tokens,
            ),
        )
        self._thread.run(lambda: None if self._is_closed else self._passes.put(passed, dp_rank))

    def shutdown(self) -> None:
        """Stop publishing."""
        self._thread.run(self._shut)

    def _shut(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._passes.close()
            self._tasks.start(self._late.close(), "close forward passes")


class FpmEventSubscriber:
    """Receive the steps of all workers of an endpoint: each message (`recv`), or the newest ones (`start_tracking`)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._thread = LoopThread()
        self._unread: queue.Queue[bytes | None] = queue.Queue(UNREAD_MAX)
        self._recent: dict[RankKey, bytes] = {}
        self._listening: asyncio.Task[None] | None = None
        self._is_tracking = False
        self._is_closed = False

    def recv(self) -> bytes | None:
        """Return the next message, None after `shutdown`. Blocks: not for the loop's thread."""
        if self._is_tracking:
            raise InvalidArgument("FpmEventSubscriber.recv: cannot be called after start_tracking")
        self._thread.run(self._listen)
        return None if self._is_closed and self._unread.empty() else self._unread.get()

    def start_tracking(self) -> None:
        """Keep the newest message of every rank from now on."""
        self._is_tracking = True
        self._thread.run(self._listen)

    def get_recent_stats(self) -> dict[RankKey, bytes]:
        """Return the newest message of each live worker and rank. Raise `InvalidArgument` before `start_tracking`."""
        if not self._is_tracking:
            raise InvalidArgument("FpmEventSubscriber.get_recent_stats: call start_tracking first")
        return dict(self._recent)

    def shutdown(self) -> None:
        """Stop; a caller blocked in `recv` receives None."""
        self._thread.run(self._shut)

    def _listen(self) -> None:
        if self._listening is None and not self._is_closed:
            self._listening = self._endpoint.runtime.tasks.start(self._follow(), "forward passes")

    def _shut(self) -> None:
        self._is_closed = True
        if self._listening is not None:
            self._listening.cancel()
        self._give(None)

    async def _follow(self) -> None:
        subscriber = await self._endpoint.runtime.event_plane.subscriber(self._endpoint.id, FORWARD_PASS_TOPIC)
        try:
            await self._receive(aiter(subscriber))
        finally:
            await subscriber.close()

    async def _receive(self, events: AsyncIterator[object]) -> None:
        ranks: dict[int, set[RankKey]] = {}
        async for event in events:
            if not isinstance(event, Event):
                for key in ranks.pop(getattr(event, "publisher_id", 0), ()):
                    self._recent.pop(key, None)
            elif not self._is_tracking:
                self._give(event.payload)
            else:
                try:
                    metrics = read_metrics(event.payload)
                except UNREADABLE:
                    continue
                key = (metrics.worker_id, metrics.dp_rank)
                ranks.setdefault(event.publisher_id, set()).add(key)
                self._recent[key] = event.payload

    def _give(self, payload: bytes | None) -> None:
        """Queue a message; when full, the oldest one is dropped, since planners need the present state."""
        while True:
            try:
                self._unread.put_nowait(payload)
            except queue.Full:
                self._unread.get_nowait()
            else:
                return
