"""FpmDirectPublisher and FpmEventSubscriber: forward-pass metrics under upstream's names."""

import asyncio
import logging
import queue
from collections.abc import AsyncIterator
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decoder, json_encode, msgpack_decoder
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import LoopCaller
from dynamo.kv_events.forward_pass import FORWARD_PASS_TOPIC, ForwardPassPublisher
from dynamo.kv_events.publisher import LatePublisher
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.load import ForwardPass, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.runtime.component import Endpoint
from dynamo.runtime.discovery.base import Delete, Synced
from dynamo.runtime.event_plane.base import Event

UNREAD_MAX = 10_000  # Messages: ten seconds of an engine with a thousand steps per second while the reader hangs.

logger = logging.getLogger(__name__)

read_metrics = msgpack_decoder(ForwardPassMetrics).decode
_read_record = json_decoder(dict[str, Any]).decode

RankKey = tuple[str, int]
"""Worker id and data-parallel rank."""


class FpmDirectPublisher:
    """Publisher for an engine that counts its own steps. Heartbeats are automatic; any thread may publish."""

    def __init__(self, endpoint: Endpoint, worker_id: str, dp_size: int = 1) -> None:
        if dp_size < 1:
            raise InvalidArgument(f"dp_size {dp_size}: expected 1 or more", param="dp_size")
        self._ranks = dp_size
        self._thread = LoopCaller()
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


class FpmEventRelay:
    """Republish the forward-pass metrics that an engine's child process sends to a ZMQ address of this host."""

    def __init__(self, endpoint: Endpoint, zmq_endpoint: str) -> None:
        """Connect to the engine's PUB socket, such as `tcp://127.0.0.1:20380`. Raise `InvalidArgument`."""
        import zmq
        import zmq.asyncio

        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        try:
            self._socket.connect(zmq_endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise InvalidArgument(f"FpmEventRelay: {zmq_endpoint}: {error}", param="zmq_endpoint") from None
        self._thread = LoopCaller()
        self._tasks = endpoint.runtime.tasks
        self._late = LatePublisher(endpoint, FORWARD_PASS_TOPIC)
        self._relaying = self._tasks.start(self._relay(), "relay forward passes")

    def shutdown(self) -> None:
        """Stop relaying."""
        self._thread.run(self._shut)

    def _shut(self) -> None:
        self._relaying.cancel()
        self._tasks.start(self._late.close(), "close forward passes")

    async def _relay(self) -> None:
        try:
            while True:  # Frames of a message: topic, sequence number, payload.
                self._late.publish((await self._socket.recv_multipart())[-1])
        finally:
            self._socket.close()


class FpmEventSubscriber:
    """Receive the steps of all workers of an endpoint: each message (`recv`), or the newest ones (`start_tracking`)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._thread = LoopCaller()
        self._unread: queue.Queue[bytes | None] = queue.Queue(UNREAD_MAX)
        self._recent: dict[RankKey, bytes] = {}
        self._cards: dict[str, str] = {}
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
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

    def get_model_cards(self) -> dict[str, str]:
        """Return the JSON form of each worker's model card by worker id. Raise `InvalidArgument` before `start_tracking`."""
        if not self._is_tracking:
            raise InvalidArgument("FpmEventSubscriber.get_model_cards: call start_tracking first")
        return dict(self._cards)

    def shutdown(self) -> None:
        """Stop; a caller blocked in `recv` receives None."""
        self._thread.run(self._shut)

    def _listen(self) -> None:
        if self._listening is None and not self._is_closed:
            self._listening = self._endpoint.runtime.tasks.start(self._follow(), "forward passes")
            if self._is_tracking:
                self._watching = self._endpoint.runtime.tasks.start(self._follow_cards(), "model cards")

    def _shut(self) -> None:
        self._is_closed = True
        for task in (self._listening, self._watching):
            if task is not None:
                task.cancel()
        self._give(None)

    async def _follow(self) -> None:
        subscriber = await self._endpoint.runtime.event_plane.subscriber(self._endpoint.id, FORWARD_PASS_TOPIC)
        try:
            await self._receive(aiter(subscriber))
        finally:
            await subscriber.close()

    async def _follow_cards(self) -> None:
        """Keep the cards of the endpoint's component."""
        component = f"{self._endpoint.id.namespace}/{self._endpoint.id.component}/"
        async for change in self._endpoint.discovery.watch(MODEL_CARDS):
            if isinstance(change, Synced) or not change.key.startswith(component) or change.key.count("/") != 3:
                continue  # A longer key is the card of an adapter.
            worker_id = str(int(change.key.rpartition("/")[2], 16))
            if isinstance(change, Delete):
                self._cards.pop(worker_id, None)
                continue
            try:
                self._cards[worker_id] = json_encode(_read_record(change.value)["card_json"]).decode()
            except (*UNREADABLE, KeyError, TypeError) as error:
                logger.warning("malformed model card %s: %s", change.key, error)

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
                self._observe(key, metrics)

    def _observe(self, key: RankKey, metrics: ForwardPassMetrics) -> None:
        """See each step while tracking; for subclasses."""

    def _give(self, payload: bytes | None) -> None:
        """Queue a message; when full, the oldest one is dropped, since planners need the present state."""
        while True:
            try:
                self._unread.put_nowait(payload)
            except queue.Full:
                self._unread.get_nowait()
            else:
                return
