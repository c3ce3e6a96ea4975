"""Fetching: fetch KV blocks from prefill workers to a decode worker, off the engine's thread."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dynamo.core.boundaries import logged
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.generation import Fetch
from dynamo.cpu.kv_exporter import agent_of
from dynamo.kvbm.transfer import shared
from dynamo.kvbm.transfer.base import Deadline, Descriptor, PullMember, Region, TransferError, Transport
from dynamo.kvbm.transfer.nixl import NixlPuller
from dynamo.kvbm.transfer.puller import Pulled, Puller
from dynamo.kvbm.transfer.sessions import WHOLE_S, TransferEnd, TransferSession, attend, leave
from dynamo.kvbm.transfer.shared import SharedMemoryPuller
from dynamo.kvbm.transfer.tcp import PLAIN, TcpPuller
from dynamo.runtime.request_plane.tcp.tls import TcpTls

logger = logging.getLogger(__name__)

MEETINGS = 64  # Sessions mostly wait for prompts to be computed.
THREADS = 4  # Copying is limited by memory bandwidth; extra threads only cover stalled sources.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Ended = Callable[[Fetch, bool], None]
"""Callback on a pool thread at the end of a fetch; the flag is True if all blocks arrived."""
First = Callable[[Fetch], None]
"""Callback on a pool thread when the first output token arrived before the last block."""
OnFetched = Callable[[str, Pulled | None], None]
"""Callback on a pool thread with the outcome of a fetch and the amount moved."""


class KvFetcher:
    """`BlockPuller` over a `Puller`."""

    def __init__(
        self,
        puller: Puller,
        block_tokens: int,
        timeout_s: float,
        ended: Ended,
        on_fetched: OnFetched,
        *,
        first: First = lambda _: None,
        tls: TcpTls = PLAIN,
    ) -> None:
        self._puller = puller
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._ended = ended
        self._on_fetched = on_fetched
        self._first = first
        self._tls = tls
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dynamo-kv-fetch")
        self._meetings = ThreadPoolExecutor(MEETINGS, thread_name_prefix="dynamo-kv-meeting")

    def begin(self, fetch: Fetch) -> None:
        sequence = fetch.sequence
        assert sequence is not None, "a fetch without a sequence"
        cached, blocks = sequence.computed // self._block_tokens, list(sequence.blocks)
        if (meeting := fetch.meeting) is not None:
            fetch.deadline.at = time.monotonic() + WHOLE_S
            work = partial(self._execute, fetch, lambda: self._meet(fetch, meeting, blocks, cached))
        else:
            fetch.deadline.at = time.monotonic() + self._timeout_s
            work = partial(self._execute, fetch, lambda: self._pull(fetch, blocks, cached))
        if not self._submit(work, is_meeting=meeting is not None):
            self._ended(fetch, False)

    def abandon(self, fetch: Fetch) -> None:
        fetch.deadline.aborted.set()
        if fetch.sequence is None:
            self._submit(partial(self._release, fetch), is_meeting=fetch.meeting is not None)

    def close(self) -> None:
        """Cancel queued fetches; running ones end at their deadline or when their connection closes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._meetings.shutdown(wait=False, cancel_futures=True)
        self._puller.close()

    def _submit(self, work: Callable[[], None], *, is_meeting: bool) -> bool:
        try:
            (self._meetings if is_meeting else self._threads).submit(work)
        except RuntimeError:  # The pool is closed; the engine is stopping.
            return False
        return True

    def _pull(self, fetch: Fetch, blocks: Sequence[int], cached: int) -> Pulled | None:
        assert fetch.descriptor is not None, "a fetch without a source"
        pairs = list(enumerate(blocks))[cached:]
        return self._puller.pull(fetch.descriptor, pairs, fetch.deadline) if pairs else None

    def _meet(self, fetch: Fetch, meeting: TransferSession, blocks: Sequence[int], cached: int) -> Pulled | None:
        """Pull completed blocks while the rest of the prompt is computed."""
        reached, all_pulled = 0, list[Pulled]()
        assert fetch.understand is not None, "a session without a decoder"
        for word in attend(meeting, fetch.deadline, self._tls):
            if isinstance(word, TransferEnd):
                fetch.understand(word.params, reached)
                self._first(fetch)
                part = fetch.descriptor
                assert part is not None, "the session ended without blocks"
            elif word.first != reached:
                raise TransferError(f"blocks from {word.first} on were announced after {reached}")
            else:
                part = Descriptor.check(word.descriptor)
            if reached + len(part.blocks) > len(blocks):
                raise TransferError("more blocks than the prompt has")
            pairs = [(at, blocks[reached + at]) for at in range(len(part.blocks)) if reached + at >= cached]
            deadline = Deadline(time.monotonic() + self._timeout_s, fetch.deadline.stall_s, fetch.deadline.aborted)
            if pairs:
                all_pulled.append(self._puller.pull(part, pairs, deadline))
            if part is not fetch.descriptor:
                with contextlib.suppress(TransferError):  # The lease expires by itself.
                    self._puller.release(part)
            reached += len(part.blocks)
        if not all_pulled:
            return None
        size, seconds = sum(one.bytes for one in all_pulled), sum(one.seconds for one in all_pulled)
        return Pulled(all_pulled[-1].transport, size, seconds)

    def _execute(self, fetch: Fetch, work: Callable[[], Pulled | None]) -> None:
        pulled: Pulled | None = None
        outcome = "failed"
        with logged(logger, "failed to fetch the blocks of a prompt; computing it on this worker"):
            try:
                pulled = work()
                outcome = "ok"
            except TransferError as error:
                outcome = error.kind
                message = "failed to fetch the blocks of a prompt (%s): %s; computing it on this worker"
                logger.info(message, outcome, error)
        self._ended(fetch, outcome == "ok")
        self._on_fetched(outcome, pulled)
        self._release(fetch)

    def _release(self, fetch: Fetch) -> None:
        """Release the blocks at the prefill worker. A session that failed is released by its connection."""
        with logged(logger, "failed to release fetched blocks at the source"):  # It releases them after its timeout.
            try:
                if fetch.descriptor is not None:
                    self._puller.release(fetch.descriptor)
                elif fetch.meeting is not None and fetch.sequence is None:
                    leave(fetch.meeting, fetch.deadline, self._tls)
            except TransferError as error:
                logger.info("failed to cancel a transfer at a prefill worker: %s", error)


def open_puller(region: Region, transports: Sequence[Transport], tls: TcpTls) -> Puller:
    """Return a puller with the transports of this process in order of preference."""
    tcp = TcpPuller(region, tls)
    members: list[PullMember] = []
    for transport in transports:
        if transport is Transport.TCP:
            members.append(tcp)
        elif transport is Transport.SHARED_MEMORY and shared.is_available():
            members.append(SharedMemoryPuller(region))
        elif transport is Transport.NIXL and (agent := agent_of(region, transports)) is not None:
            members.append(NixlPuller(agent, tcp))
    return Puller(region, members)


class FetchMetrics:
    """Prometheus metrics of fetches. Used on the loop's thread."""

    def __init__(self, registry: MetricsRegistry, model: str) -> None:
        self._model = model
        self._pulls = registry.counter(
            "dynamo_component_kv_fetches_total",
            "Fetches of prompts' KV blocks, by outcome",
            ("model", "transport", "outcome"),
        )
        self._bytes = registry.counter(
            "dynamo_component_kv_fetched_bytes_total", "Bytes of KV blocks fetched", ("model", "transport")
        )
        self._seconds = registry.histogram(
            "dynamo_component_kv_fetch_seconds", "Time to fetch a prompt's KV blocks", ("model", "transport"), BUCKETS_S
        )
        self._local = registry.counter(
            "dynamo_component_local_prefills_total",
            "Prompts computed by this decode worker instead of fetched, by reason",
            ("model", "reason"),
        )

    def fetched(self, outcome: str, pulled: Pulled | None) -> None:
        """Record a completed fetch."""
        transport = pulled.transport.value if pulled is not None else "none"
        self._pulls.labels(model=self._model, transport=transport, outcome=outcome).inc()
        if pulled is not None:
            self._bytes.labels(model=self._model, transport=transport).inc(pulled.bytes)
            self._seconds.labels(model=self._model, transport=transport).observe(pulled.seconds)
        if outcome not in ("ok", "aborted"):
            self.computed_here(outcome)

    def computed_here(self, reason: str) -> None:
        """Record a prompt that this worker computed itself."""
        self._local.labels(model=self._model, reason=reason).inc()
