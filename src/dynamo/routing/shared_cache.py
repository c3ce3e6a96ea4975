"""SharedCache: what a cache that all workers read has of a prompt (`--shared-cache-type hicache`).

    cards   runtime_data: layout of pages, where the store tells of them   ──▶ hear_cards
    store   ZMQ PUB: topic, number, (milliseconds, objects, rank)          ──▶ SharedPages
    router  find(tokens)                                                   ──▶ the blocks that need not be computed

The deciding is `kv_router.hicache`'s. A store that is silent, or workers that disagree about it, leave the router with what
the workers hold themselves.
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
from dynamo.core.metrics import MetricsRegistry, log_buckets
from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.hicache import RUNTIME_KEY, HicacheLayout, ObjectEvent, Runs, SharedPages, read_layout
from dynamo.protocols.model_card import ModelDeploymentCard

logger = logging.getLogger(__name__)

UNREAD_MAX = 100_000  # Messages that wait for us; more are a gap, after which all is forgotten.
FRAMES = 3

decode_fields = msgpack_decoder(tuple[int | float, list[Any], int]).decode
NAMES = ObjectEvent.__struct_fields__


class SharedCache:
    """One worker set's shared cache."""

    def __init__(self, block_size: int, registry: MetricsRegistry, router_id: str, name: str = "") -> None:
        self.pages = SharedPages()
        self._block_size = block_size
        self._name = name
        self._tasks = TaskOwner(f"shared cache of {name}")
        self._endpoint: str | None = None
        """Where the store is heard."""
        self._changed = asyncio.Event()
        """Set when that is another place than before."""
        self._warned = ""
        self._metrics = SharedCacheMetrics(registry, router_id)

    @property
    def is_sound(self) -> bool:
        """False while the store is not followed although there is one."""
        return self._tasks.is_sound

    @property
    def endpoint(self) -> str | None:
        """Where the store is heard; None where nobody said, or workers disagree."""
        return self._endpoint

    async def start(self) -> None:
        """Begins to follow the store."""
        self._tasks.supervise(self._follow, "store")

    async def close(self) -> None:
        """Ends."""
        await self._tasks.cancel_and_wait()

    def hear_cards(self, cards: Iterable[ModelDeploymentCard]) -> None:
        """What the workers say of it now."""
        try:
            layout = agreed_layout(cards, self._block_size)
            self._warned = ""
        except InvalidArgument as error:
            layout = None
            if self._warned != str(error):
                self._warned = str(error)
                logger.warning("the shared cache of %s is left out: %s", self._name, error)
        endpoint = layout.kv_events_endpoint if layout is not None else None
        self.pages.lay_out(layout)
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._changed.set()

    def find(self, tokens: Sequence[int]) -> Runs:
        """Which blocks of a prompt it has."""
        began = time.perf_counter()
        found = self.pages.find(tokens)
        self._metrics.asked((time.perf_counter() - began) * 1e3)
        return found

    def used(self, held: int, blocks: int, beyond: int) -> None:
        """A prompt of so many blocks, of which it has some, went to a worker for which it has `beyond` more."""
        self._metrics.used(held, blocks, beyond)

    def hear(self, frames: Sequence[bytes]) -> None:
        """One message of the store. What cannot be read is left out, and counted."""
        if len(frames) != FRAMES or len(frames[1]) != 8:
            self._metrics.errors.inc()
            logger.warning("the store of %s says what cannot be read: %d frames", self._name, len(frames))
            return
        try:
            events = [_event(one) for one in decode_fields(frames[2])[1]]
        except UNREADABLE as error:
            self._metrics.errors.inc()
            logger.warning("the store of %s says what cannot be read: %s", self._name, error)
            return
        if not self.pages.apply(struct.unpack(">Q", frames[1])[0], events):
            logger.warning("something that the store of %s said was missed: what it has is learned anew", self._name)

    async def _follow(self) -> None:
        """Follows the store, wherever it is."""
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
                self.hear(await socket.recv_multipart())
        finally:
            socket.close()
            context.term()


def agreed_layout(cards: Iterable[ModelDeploymentCard], block_size: int) -> HicacheLayout | None:
    """How the workers store their pages; None where none does. Raises `InvalidArgument` where it cannot be made use of."""
    given = [card.runtime_config.runtime_data.get(RUNTIME_KEY) for card in cards]
    found = [read_layout(one) for one in given if one is not None]
    if not found:
        return None
    places = {one.kv_events_endpoint for one in found if one.kv_events_endpoint}
    bare = {msgspec.structs.replace(one, kv_events_endpoint=None) for one in found}
    if len(bare) > 1 or len(places) > 1:
        raise InvalidArgument("workers disagree about where or how their pages are stored")
    layout = bare.pop()
    if layout.backend != "mooncake":
        raise InvalidArgument(f"{layout.backend} is a store that cannot be followed")
    if layout.page_size != block_size:
        raise InvalidArgument(f"pages of {layout.page_size} tokens, but blocks of {block_size}")
    return msgspec.structs.replace(layout, kv_events_endpoint=places.pop() if places else None)


class SharedCacheMetrics:
    """What asking costs, and what was found (serving-plane.md §7.3, §7.4)."""

    def __init__(self, registry: MetricsRegistry, router_id: str) -> None:
        def family(make: Any, name: str, what: str, *more: Any) -> Any:
            return make(name, what, ("router_id",), *more).labels(router_id=router_id)

        self._asked = family(
            registry.histogram,
            "dynamo_router_overhead_shared_cache_query_ms",
            "Asking what a shared cache has of a prompt",
            log_buckets(0.01, 100.0, 16),
        )
        self.errors = family(
            registry.counter,
            "dynamo_router_shared_cache_errors_total",
            "Messages of a shared cache that could not be read or received",
        )
        self._rate = family(
            registry.histogram,
            "dynamo_component_router_shared_cache_hit_rate",
            "Part of a prompt's blocks that a shared cache has",
            tuple(step / 10 for step in range(11)),
        )
        self._beyond = family(
            registry.histogram,
            "dynamo_component_router_shared_cache_beyond_blocks",
            "Blocks that a shared cache has beyond the chosen worker's own",
            (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0),
        )

    def asked(self, milliseconds: float) -> None:
        """It was asked."""
        self._asked.observe(milliseconds)

    def used(self, held: int, blocks: int, beyond: int) -> None:
        """A request was given a worker."""
        if blocks:
            self._rate.observe(min(1.0, held / blocks))
        self._beyond.observe(beyond)


def _event(given: Any) -> ObjectEvent:
    """An object's event, its fields by name or in their order. Raises `ValidationError`."""
    fields = dict(zip(NAMES, given, strict=False)) if isinstance(given, list) else given
    return msgspec.convert(fields, ObjectEvent)
