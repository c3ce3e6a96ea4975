"""SharedCache: the cached prompt blocks in a store that all workers share (`--shared-cache-type hicache`).

    cards   runtime_data: page layout and event endpoint of the store      ──▶ apply_cards
    store   ZMQ PUB: topic, number, (milliseconds, objects, rank)          ──▶ SharedPages
    router  find(tokens)                                                   ──▶ blocks that need not be computed

`kv_router.hicache` makes the decisions. If the store publishes nothing, or the workers' cards contradict each other
about it, only the workers' own caches count.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo.core.codec import UNREADABLE, msgpack_decoder
from dynamo.core.errors import InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.hicache import RUNTIME_KEY, HicacheLayout, HicachePages, ObjectEvent, Runs, read_layout
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.metrics import SharedCacheMetrics

logger = logging.getLogger(__name__)

UNREAD_MAX = 100_000  # Receive queue length, in messages; an overflow is a gap, after which the index is cleared.
FRAMES = 3

decode_fields = msgpack_decoder(tuple[int | float, list[Any], int]).decode
NAMES = ObjectEvent.__struct_fields__


class SharedCache:
    """Shared cache of one worker set."""

    def __init__(self, block_size: int, metrics: SharedCacheMetrics, name: str = "") -> None:
        self.pages = HicachePages()
        self._block_size = block_size
        self._name = name
        self._tasks = TaskOwner(f"shared cache of {name}")
        self._endpoint: str | None = None
        """Address of the store's event publisher."""
        self._changed = asyncio.Event()
        """Event set when the address changes."""
        self._warned = ""
        self._metrics = metrics

    @property
    def is_sound(self) -> bool:
        """False while there is a store and it is not followed."""
        return self._tasks.is_sound

    @property
    def endpoint(self) -> str | None:
        """Address of the store's event publisher; None if no card has it or the cards contradict each other."""
        return self._endpoint

    async def start(self) -> None:
        """Start following the store."""
        self._tasks.supervise(self._follow, "store")

    async def close(self) -> None:
        """Stop."""
        await self._tasks.cancel_and_wait()

    def apply_cards(self, cards: Iterable[ModelDeploymentCard]) -> None:
        """Apply the store settings on the workers' cards."""
        try:
            layout = agreed_layout(cards, self._block_size)
            self._warned = ""
        except InvalidArgument as error:
            layout = None
            if self._warned != str(error):
                self._warned = str(error)
                logger.warning("ignoring the shared cache of %s: %s", self._name, error)
        endpoint = layout.kv_events_endpoint if layout is not None else None
        self.pages.lay_out(layout)
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._changed.set()

    def find(self, tokens: Sequence[int]) -> Runs:
        """Return the blocks of a prompt that the store contains."""
        began = time.perf_counter()
        found = self.pages.find(tokens)
        self._metrics.looked_up((time.perf_counter() - began) * 1e3)
        return found

    def used(self, held: int, blocks: int, beyond: int) -> None:
        """Record a placed prompt of `blocks` blocks: `held` in the store, `beyond` of them not on the chosen worker."""
        self._metrics.used(held, blocks, beyond)

    def apply(self, frames: Sequence[bytes]) -> None:
        """Apply one message of the store; an unreadable one is dropped and counted."""
        if len(frames) != FRAMES or len(frames[1]) != 8:
            self._metrics.errors.inc()
            logger.warning("malformed message from the store of %s: %d frames", self._name, len(frames))
            return
        try:
            events = [_event(one) for one in decode_fields(frames[2])[1]]
        except UNREADABLE as error:
            self._metrics.errors.inc()
            logger.warning("unreadable message from the store of %s: %s", self._name, error)
            return
        if not self.pages.apply(struct.unpack(">Q", frames[1])[0], events):
            logger.warning("missed messages from the store of %s; rebuilding its index", self._name)

    async def _follow(self) -> None:
        """Follow the store at its current address."""
        while True:
            self._changed.clear()
            endpoint = self._endpoint
            listening = asyncio.ensure_future(self._listen(endpoint) if endpoint else asyncio.Event().wait())
            moving = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({listening, moving}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done() and (error := listening.exception()) is not None:
                    self._metrics.errors.inc()
                    raise error
            finally:
                for task in (listening, moving):
                    task.cancel()
                await asyncio.gather(listening, moving, return_exceptions=True)

    async def _listen(self, endpoint: str) -> None:
        import zmq
        import zmq.asyncio

        self.pages.clear()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
            socket.subscribe(b"")
            socket.connect(endpoint)
            logger.info("following the shared cache of %s at %s", self._name, endpoint)
            while True:
                self.apply(await socket.recv_multipart())
        finally:
            socket.close()
            context.term()


def agreed_layout(cards: Iterable[ModelDeploymentCard], block_size: int) -> HicacheLayout | None:
    """Return the page layout of the store; None if no worker has one. Raises `InvalidArgument` if it is unusable."""
    given = [card.runtime_config.runtime_data.get(RUNTIME_KEY) for card in cards]
    found = [read_layout(one) for one in given if one is not None]
    if not found:
        return None
    places = {one.kv_events_endpoint for one in found if one.kv_events_endpoint}
    bare = {msgspec.structs.replace(one, kv_events_endpoint=None) for one in found}
    if len(bare) > 1 or len(places) > 1:
        raise InvalidArgument("workers report different addresses or page layouts of the store")
    layout = bare.pop()
    if layout.backend != "mooncake":
        raise InvalidArgument(f"unsupported store backend {layout.backend}")
    if layout.page_size != block_size:
        raise InvalidArgument(f"page size of {layout.page_size} tokens does not fit the block size of {block_size}")
    return msgspec.structs.replace(layout, kv_events_endpoint=places.pop() if places else None)


def _event(given: Any) -> ObjectEvent:
    """Decode an object's event, with fields by name or by position. Raises `ValidationError`."""
    fields = dict(zip(NAMES, given, strict=False)) if isinstance(given, list) else given
    return msgspec.convert(fields, ObjectEvent)
