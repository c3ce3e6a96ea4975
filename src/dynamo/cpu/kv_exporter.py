"""Lending: export of a prefill worker's cache to decode workers: its memory and the blocks held for them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.listening import listen_error
from dynamo.core.metrics import MetricsRegistry
from dynamo.kvbm.transfer import nixl, shared
from dynamo.kvbm.transfer.base import Bytes, Descriptor, Layout, Region, Transport
from dynamo.kvbm.transfer.nixl import NixlAgent
from dynamo.kvbm.transfer.sessions import TransferServer, TransferSession
from dynamo.kvbm.transfer.shared import SharedMemoryPages
from dynamo.kvbm.transfer.source import SourceOptions, TransferSource
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)


class KvExporter:
    """`BlockExporter` over a `TransferSource`. The memory is allocated before the cache and exported once the cache lies in it."""

    def __init__(self, transports: Sequence[Transport], size: int) -> None:
        self._transports = transports
        has_shared = Transport.SHARED_MEMORY in transports and shared.is_available()
        self._pages = SharedMemoryPages(size) if has_shared else None
        self.memory: Bytes | None = None if self._pages is None else self._pages.array
        """Shared memory for the cache, if other processes may map it."""
        self._source: TransferSource | None = None
        self.server: TransferServer | None = None
        """Server to which decode workers connect while prompts are computed, if enabled."""

    def open(
        self,
        layout: Layout,
        pages: npt.NDArray[np.float32],
        options: SourceOptions,
        freed: Callable[[Sequence[int]], None],
    ) -> None:
        """Start to serve. Raise `ConfigError` if the address cannot be bound."""
        region = Region(layout, pages)
        self._source = TransferSource(
            region,
            freed,
            options,
            pages=self._pages,
            agent=agent_of(region, self._transports),
            is_tcp_offered=Transport.TCP in self._transports,
        )
        try:
            self._source.start()
        except OSError as error:
            raise listen_error(f"--kv-transfer-port {options.port}", options.host, error) from None

    def open_server(self, host: str, port: int, tls: TcpTls) -> None:
        """Accept decode workers before a prompt is computed. Raise `ConfigError` if the address cannot be bound."""
        assert self._source is not None, "the transfer server was opened without a source"
        try:
            self.server = TransferServer(host, port, release=self._source.release, tls=tls)
        except OSError as error:
            raise listen_error(f"--disaggregation-bootstrap-port {port}", host, error) from None

    def send_part(self, meeting: TransferSession, first: int, descriptor: Descriptor) -> None:
        if self.server is not None:
            self.server.add(meeting.room, meeting.key, first, descriptor)

    def finish_session(self, meeting: TransferSession, params: dict[str, Any]) -> None:
        if self.server is not None:
            self.server.end(meeting.room, meeting.key, params)

    def fail_session(self, meeting: TransferSession, reason: str) -> None:
        if self.server is not None:
            self.server.fail(meeting.room, meeting.key, reason)

    @property
    def is_quiescent(self) -> bool:
        """Return whether no block is held for a decode worker."""
        return self._source is None or self._source.leases == 0

    def export(self, blocks: Sequence[int]) -> Descriptor | None:
        assert self._source is not None, "blocks were exported before the source was open"
        return self._source.publish(blocks)

    def release_oldest(self) -> None:
        if self._source is not None:
            self._source.drop_oldest()

    def show(self, registry: MetricsRegistry, model: str) -> None:
        """Register the metrics of the exporter."""
        source = self._source
        assert source is not None, "metrics of a source that is not open"
        labels = ("model",)
        registry.gauge("dynamo_component_kv_held_blocks", "KV blocks held for decode workers", labels).labels(
            model=model
        ).follow(lambda: source.held)
        registry.gauge("dynamo_component_kv_holds", "Prompts whose KV blocks are kept", labels).labels(
            model=model
        ).follow(lambda: source.leases)
        ends = registry.counter(
            "dynamo_component_kv_holds_ended_total",
            "Prompts whose KV blocks were released, by reason: fetched or expired",
            ("model", "outcome"),
        )
        ends.labels(model=model, outcome="fetched").follow(lambda: source.pulled)
        ends.labels(model=model, outcome="given_up").follow(lambda: source.expired)

    def close(self) -> None:
        """Stop serving."""
        if self.server is not None:
            self.server.close()
        if self._source is not None:
            self._source.close()
        elif self._pages is not None:
            self._pages.close()


def agent_of(region: Region, transports: Sequence[Transport]) -> NixlAgent | None:
    """Return the NIXL agent of a cache, if NIXL is enabled, installed and working."""
    if Transport.NIXL not in transports or not nixl.is_available():
        return None
    # The library's errors have no common base class.
    with ErrorBoundary(partial(logger.warning, "NIXL is installed but failed to start: %s")):
        agent = NixlAgent(region)
        logger.warning(
            "--kv-transfer nixl: a worker that is granted one transfer can access this worker's whole KV cache"
        )
        return agent
    return None
