"""CacheTiers: the embedded engine's cache as the first of the block manager's tiers (docs/kvbm.md).

    a block is computed        ─▶ save: it is copied into the host
    a block is given up        ─▶ carry_out: it is copied into the host, if it is not there any more
    a prompt waits             ─▶ is_ready: what disk or object store have of it is on its way into the host
    a prompt starts            ─▶ take, load: what the host has of it is copied into the cache before the step

Device and host are the same memory here, so that these copies are made by the engine's own thread: they cost a thousandth
of what computing costs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.attention import F32, KvCache
from dynamo.cpu.blocks import BlockPool, Content, Evicted
from dynamo.cpu.layout import fingerprint
from dynamo.cpu.sequence import Sequence
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import Identity
from dynamo.kvbm.logical.consolidator import Consolidator, Told
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.metrics import MetricsServer, show
from dynamo.kvbm.orders import Array, Outgoing, Peer, Ticket
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.protocols.kv_events import Cleared, KvEvent
from dynamo.routing.kv_peers import ADDRESS
from dynamo.runtime.request_plane.tcp import TcpTls

WAITING_MAX = 16  # Prompts whose blocks are on their way at the same time; each holds room in the host.
WAIT_S = 0.02  # Where there is nothing else to do: how soon orders are looked at again.


class CacheTiers:
    """Copies between cache and host. The engine's thread calls it."""

    def __init__(self, manager: BlockManager, cache: KvCache, block_tokens: int) -> None:
        self.manager = manager
        self._cache = cache
        self._block_tokens = block_tokens
        self._tickets: dict[Sequence, Ticket | None] = {}
        """What the waiting sequences wait for; None: nothing."""
        self._loads: list[tuple[int, int]] = []
        self._consolidator = Consolidator()
        self._server: MetricsServer | None = None

    def start(self, metrics: MetricsRegistry) -> None:
        """Begins to work, and shows what is done."""
        show(metrics, self.manager, self._block_tokens)
        config = self.manager.config
        if config.has_metrics_port:
            own = MetricsRegistry()
            show(own, self.manager, self._block_tokens)
            self._server = MetricsServer(own, config.metrics_port)
        self.manager.start()

    @property
    def runtime_data(self) -> dict[str, str]:
        """What the model's card says of it: where peers ask for blocks."""
        address = self.manager.peer_address
        return {} if address is None else {ADDRESS: address}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.manager.close()

    async def route(self, body: dict[str, Any]) -> dict[str, Any]:
        """`/engine/kvbm`: how full the tiers are."""
        return self.manager.status()

    # The scheduler's side.

    def is_ready(self, sequence: Sequence, pool: BlockPool) -> bool:
        """False while more of its prefix than the cache's part is on its way into the host."""
        if sequence not in self._tickets:
            hashes = sequence.reusable_hashes()
            cached = pool.depth(hashes)
            if len(self._on_the_way()) >= WAITING_MAX:
                return not self.manager.reaches(hashes[cached:])
            peer: Peer | None = None
            if sequence.peer is not None and sequence.peer[1] > cached:
                peer = Peer(sequence.peer[0], sequence.peer[1] - cached)
            self._tickets[sequence] = self.manager.begin(_identities(sequence, cached, len(hashes)), peer)
        ticket = self._tickets[sequence]
        return ticket is None or self.manager.is_over(ticket)

    def take(self, sequence: Sequence, cached: int) -> list[int]:
        """Holds the host's blocks behind the cache's part of a prefix."""
        hashes = sequence.reusable_hashes()
        if cached:
            self.manager.touch(hashes[:cached])
        return self.manager.find(hashes[cached:]) if cached < len(hashes) else []

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """To be copied before the next step is computed."""
        self._loads += zip(slots, blocks, strict=True)

    def save(self, sequence: Sequence, parent_hash: int | None, contents: list[Content]) -> None:
        """These blocks were computed."""
        outgoing = []
        for content in contents:
            identity = Identity(content.sequence_hash, content.tokens_hash, parent_hash, sequence.priority)
            outgoing.append(Outgoing(identity, partial(self._copy_out, content.block)))
            parent_hash = content.sequence_hash
        self.manager.offload(outgoing)

    def forget(self, sequence: Sequence) -> None:
        """It waits for nothing any more."""
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            self.manager.end(ticket)

    # The core's side.

    def carry_out(self, evicted: Iterable[Evicted]) -> None:
        """Saves what is given up and copies what is wanted. Nothing has been written into the cache since the plan."""
        for one in evicted:
            identity = Identity(one.sequence_hash, one.tokens_hash, one.parent_hash)
            self.manager.offload([Outgoing(identity, partial(self._copy_out, one.block))])
        if self._loads:
            for slot, block in self._loads:
                self._block(block)[...] = self.manager.array(slot)
            self.manager.release([slot for slot, _ in self._loads])
            self._loads.clear()

    def wait(self) -> None:
        """There is nothing to compute until blocks come."""
        self.manager.wait(WAIT_S)

    def tell(self, events: list[KvEvent]) -> list[Told]:
        """What the cache and the tiers have to tell, as one story."""
        told = list(self._consolidator.device(events))
        is_anew = any(isinstance(event, Cleared) for event in events)  # Which routers take as said of all tiers.
        for tier, changes in self.manager.take_all() if is_anew else self.manager.take_changes():
            if self.manager.config.has_events:
                told += self._consolidator.lower(tier, changes)
        return told

    def clear(self) -> None:
        self.manager.clear()

    def reidentify(self, fingerprint: str) -> None:
        """The engine has other weights: no block of the former ones is used any more, wherever it lies."""
        self.manager.reidentify(fingerprint)

    def _on_the_way(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket is not None]

    def _block(self, block: int) -> F32:
        return self._cache.between(block * self._block_tokens, (block + 1) * self._block_tokens)

    def _copy_out(self, block: int, into: Array) -> None:
        into[...] = self._block(block)


def open_tiers(
    config: KvbmConfig,
    model_path: str,
    cache: KvCache,
    block_tokens: int,
    worker_id: str,
    on_change: Callable[[], None],
    tls: TcpTls = PLAIN,
) -> CacheTiers:
    """Raises `ConfigError` for tiers that cannot be."""
    shape = cache.between(0, block_tokens).shape
    layout = BlockLayout(shape, "float32", fingerprint(model_path))
    manager = BlockManager(config, layout, worker_id=worker_id, on_change=on_change, tls=tls)
    return CacheTiers(manager, cache, block_tokens)


def _identities(sequence: Sequence, first: int, end: int) -> list[Identity]:
    parent_hash, contents = sequence.contents(range(end - first), first)
    identities = []
    for content in contents:
        identities.append(Identity(content.sequence_hash, content.tokens_hash, parent_hash, sequence.priority))
        parent_hash = content.sequence_hash
    return identities
