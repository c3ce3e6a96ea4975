"""CacheTiers: connect the embedded engine's cache to the block manager as its first tier (docs/kvbm.md).

    a block is computed        ─▶ save: copy it to the host tier
    a block is evicted         ─▶ carry_out: copy it to the host tier, if it is no longer there
    a prompt waits             ─▶ is_ready: load its blocks from disk or object store into the host tier
    a prompt starts            ─▶ take, load: copy its blocks from the host tier into the cache before the step

Device and host are the same memory here, so the engine's own thread makes these copies: they cost a thousandth of the
computation.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.attention import F32, KvCache
from dynamo.cpu.blocks import BlockContent, Evicted, KvBlockPool
from dynamo.cpu.layout import fingerprint
from dynamo.cpu.sequence import TokenSequence
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.logical.consolidator import Consolidator, TierEvent
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import Array, LoadTicket, Outgoing, Peer
from dynamo.kvbm.physical.layout import BlockLayout
from dynamo.kvbm.transfer.tcp import PLAIN
from dynamo.protocols.kv_events import Cleared, KvEvent
from dynamo.routing.kv_peers import ADDRESS
from dynamo.runtime.request_plane.tcp.tls import TcpTls

if TYPE_CHECKING:
    from dynamo.kvbm.metrics import MetricsServer

WAITING_MAX = 16  # Prompts whose blocks are loaded at the same time; each occupies host blocks.
WAIT_S = 0.02  # Polling interval of the order queue while there is nothing to compute.


class CacheTiers:
    """Copies between cache and host tier. Called on the engine's thread."""

    def __init__(self, manager: BlockManager, cache: KvCache, block_tokens: int) -> None:
        self.manager = manager
        self._cache = cache
        self._block_tokens = block_tokens
        self._tickets: dict[TokenSequence, LoadTicket | None] = {}
        """Pending load of each waiting sequence; None if there is nothing to load."""
        self._loads: list[tuple[int, int]] = []
        self._consolidator = Consolidator()
        self._server: MetricsServer | None = None

    def start(self, metrics: MetricsRegistry) -> None:
        """Start the manager and register its metrics."""
        from dynamo.kvbm.metrics import MetricsServer, show  # Imports an HTTP server.

        show(metrics, self.manager, self._block_tokens)
        config = self.manager.config
        if config.has_metrics_port:
            own = MetricsRegistry()
            show(own, self.manager, self._block_tokens)
            self._server = MetricsServer(own, config.metrics_port)
        self.manager.start()

    @property
    def runtime_data(self) -> dict[str, str]:
        """Return the entries for the model card: the address from which peers request blocks."""
        address = self.manager.peer_address
        return {} if address is None else {ADDRESS: address}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.manager.close()

    async def route(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fill of the tiers (`/engine/kvbm`)."""
        return self.manager.status()

    # Called by the scheduler.

    def is_ready(self, sequence: TokenSequence, pool: KvBlockPool) -> bool:
        """Return False while more of the prefix than the cached part is being loaded into the host tier."""
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

    def take(self, sequence: TokenSequence, cached: int) -> list[int]:
        """Acquire the host tier's blocks that continue the cached part of a prefix."""
        hashes = sequence.reusable_hashes()
        if cached:
            self.manager.touch(hashes[:cached])
        return self.manager.find(hashes[cached:]) if cached < len(hashes) else []

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Queue copies into the cache that must be done before the next step."""
        self._loads += zip(slots, blocks, strict=True)

    def save(self, sequence: TokenSequence, parent_hash: int | None, contents: list[BlockContent]) -> None:
        """Save computed blocks."""
        outgoing = []
        for content in contents:
            identity = BlockIdentity(content.sequence_hash, content.tokens_hash, parent_hash, sequence.priority)
            outgoing.append(Outgoing(identity, partial(self._copy_out, content.block)))
            parent_hash = content.sequence_hash
        self.manager.offload(outgoing)

    def forget(self, sequence: TokenSequence) -> None:
        """Cancel a sequence's pending loads."""
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            self.manager.end(ticket)

    # Called by the core.

    def execute(self, evicted: Iterable[Evicted]) -> None:
        """Save evicted blocks and execute the queued copies. Must run before anything is written to the cache."""
        for one in evicted:
            identity = BlockIdentity(one.sequence_hash, one.tokens_hash, one.parent_hash)
            self.manager.offload([Outgoing(identity, partial(self._copy_out, one.block))])
        if self._loads:
            for slot, block in self._loads:
                self._block(block)[...] = self.manager.array(slot)
            self.manager.release([slot for slot, _ in self._loads])
            self._loads.clear()

    def wait(self) -> None:
        """Wait for blocks while there is nothing to compute."""
        self.manager.wait(WAIT_S)

    def consolidate(self, events: list[KvEvent]) -> list[TierEvent]:
        """Merge the events of the cache and of the tiers into one ordered list."""
        consolidated = list(self._consolidator.device(events))
        is_anew = any(isinstance(event, Cleared) for event in events)  # Routers apply `Cleared` to all tiers.
        for tier, changes in self.manager.take_all() if is_anew else self.manager.take_changes():
            if self.manager.config.has_events:
                consolidated += self._consolidator.lower(tier, changes)
        return consolidated

    def clear(self) -> None:
        self.manager.clear()

    def reidentify(self, fingerprint: str) -> None:
        """Discard all blocks in all tiers after weights with another fingerprint were loaded."""
        self.manager.reidentify(fingerprint)

    def _on_the_way(self) -> list[LoadTicket]:
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
    """Open the configured tiers. Raise `ConfigError` for an invalid configuration."""
    shape = cache.between(0, block_tokens).shape
    layout = BlockLayout(shape, "float32", fingerprint(model_path))
    manager = BlockManager(config, layout, worker_id=worker_id, on_change=on_change, tls=tls)
    return CacheTiers(manager, cache, block_tokens)


def _identities(sequence: TokenSequence, first: int, end: int) -> list[BlockIdentity]:
    parent_hash, contents = sequence.contents(range(end - first), first)
    identities = []
    for content in contents:
        identities.append(BlockIdentity(content.sequence_hash, content.tokens_hash, parent_hash, sequence.priority))
        parent_hash = content.sequence_hash
    return identities
