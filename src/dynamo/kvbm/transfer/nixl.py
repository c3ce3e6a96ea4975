"""NIXL: blocks read out of a source's memory by NVIDIA's transfer library, where that is installed.

The source does not take part in a read, and cannot detect that its blocks are being read. The release after the read
therefore returns whether the blocks were held until then; without that confirmation the read fails.
"""

import contextlib
import importlib.util
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from dynamo.core.boundaries import ErrorBoundary
from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    NotHeld,
    Pair,
    Region,
    SourceUnreachable,
    TransferError,
    TransferOffer,
    Transport,
    pair_runs,
)
from dynamo.kvbm.transfer.tcp import TcpPuller

BACKEND = "UCX"
MEMORY = "DRAM"
LINGER_S = 5.0  # Maximum wait for an abandoned transfer to end.
POLL_FIRST_S, POLL_MAX_S = 5e-5, 2e-3  # Small transfers take tens of microseconds; long ones are polled less often.


def is_available() -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec("nixl") is not None


def _translated(message: str) -> ErrorBoundary:
    """Return a boundary that raises `TransferError`: the library's errors have no common base class."""

    def fail(error: Exception) -> None:
        raise error if isinstance(error, TransferError) else SourceUnreachable(f"{message}: {error}") from None

    return ErrorBoundary(fail)


class NixlAgent:
    """NIXL agent of this process, with one region of memory."""

    def __init__(self, region: Region) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self.name = f"dynamo-{secrets.token_hex(8)}"
        self.region = region
        self._agent: Any = nixl_agent(self.name, nixl_agent_config(backends=[BACKEND]))
        self.address: int = region.flat.ctypes.data
        self._registered: Any = self._agent.register_memory([(self.address, region.flat.nbytes, 0, "")], MEMORY)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._guard = threading.Lock()
        """Serializes calls: the library's objects are not thread-safe."""

    def description(self) -> wire.AgentIs:
        """Return the metadata that other agents need to read this memory."""
        return wire.AgentIs(self.name, self.metadata, self.address, self.region.flat.nbytes)

    def meet(self, other: wire.AgentIs) -> None:
        """Add a remote agent. Raise `TransferError`."""
        with self._guard, _translated("NIXL rejected the source's metadata"):
            self._agent.add_remote_agent(other.metadata)

    def forget(self, name: str) -> None:
        """Remove a remote agent that ended."""
        with self._guard, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(name)

    def read(self, other: wire.AgentIs, pairs: Sequence[Pair], deadline: Deadline) -> None:
        """Copy blocks of a remote agent's region. Raise `TransferError`."""
        theirs, ours = _places(self.region, other.size), _places(self.region, self.region.flat.nbytes)
        remote = [place for there, _, count in pair_runs(pairs) for place in theirs(there, count, other.address)]
        local = [place for _, here, count in pair_runs(pairs) for place in ours(here, count, self.address)]
        handle: Any = None
        try:
            with _translated("NIXL"):
                with self._guard:
                    handle = self._agent.initialize_xfer(
                        "READ",
                        self._agent.get_xfer_descs(local, MEMORY),
                        self._agent.get_xfer_descs(remote, MEMORY),
                        other.name,
                    )
                    state = self._agent.transfer(handle)
                wait_s = POLL_FIRST_S
                while state == "PROC":
                    time.sleep(min(wait_s, deadline.left()))
                    wait_s = min(wait_s * 2, POLL_MAX_S)
                    with self._guard:
                        state = self._agent.check_xfer_state(handle)
        finally:
            if handle is not None:
                self._finish(handle)
        if state != "DONE":
            raise SourceUnreachable(f"NIXL: transfer ended in state {state}")

    def _finish(self, handle: Any) -> None:
        """Abandon a transfer, after waiting up to `LINGER_S` for it to end, because it writes into our blocks."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            while self._agent.check_xfer_state(handle) == "PROC" and time.monotonic() < until:
                time.sleep(POLL_MAX_S)
        with self._guard, contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Deregister the memory."""
        with self._guard, contextlib.suppress(Exception):
            self._agent.deregister_memory(self._registered)


class NixlPuller:
    """`PullMember` for NIXL; agents exchange metadata over the source's TCP port."""

    transport = Transport.NIXL

    def __init__(self, agent: NixlAgent, tcp: TcpPuller) -> None:
        self._agent = agent
        self._tcp = tcp
        self._known: dict[str, wire.AgentIs] = {}
        self._guard = threading.Lock()

    def pull(self, descriptor: Descriptor, offer: TransferOffer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        other = self._met(descriptor, offer, deadline)
        of_source = [(descriptor.blocks[place], block) for place, block in pairs]
        blocks = other.size // descriptor.layout.block_bytes
        if any(not 0 <= theirs < blocks for theirs, _ in of_source):
            raise TransferError("the descriptor has blocks outside the source's memory")
        try:
            self._agent.read(other, of_source, deadline)
        except SourceUnreachable:
            self._forget(offer, other)
            raise
        answer = self._tcp.request(offer, wire.Release(descriptor.transfer_id), deadline)
        if not isinstance(answer, wire.Released) or not answer.was_held:
            raise NotHeld("the source released the blocks while they were read")

    def release(self, descriptor: Descriptor, offer: TransferOffer) -> None:
        self._tcp.release(descriptor, offer)

    def close(self) -> None:
        with self._guard:
            self._known.clear()

    def _met(self, descriptor: Descriptor, offer: TransferOffer, deadline: Deadline) -> wire.AgentIs:
        with self._guard:
            known = self._known.get(offer.address)
        if known is not None:
            return known
        answer = self._tcp.request(offer, wire.Agent(descriptor.transfer_id), deadline)
        if not isinstance(answer, wire.AgentIs):
            raise TransferError("unexpected message from the source")
        if not answer.size or answer.size % descriptor.layout.block_bytes:
            raise TransferError("the source's memory is not a whole number of blocks")
        with self._guard:
            known = self._known.get(offer.address)
            if known is None:
                self._agent.meet(answer)
                self._known[offer.address] = known = answer
        return known

    def _forget(self, offer: TransferOffer, other: wire.AgentIs) -> None:
        with self._guard:
            if self._known.pop(offer.address, None) is not None:
                self._agent.forget(other.name)


def _places(region: Region, size: int) -> Any:
    """Return the NIXL descriptors of consecutive blocks in memory of `size` bytes, plane by plane."""
    layout = region.layout
    plane_bytes = size // layout.planes

    def places(first: int, count: int, address: int) -> list[tuple[int, int, int]]:
        begin, length = address + first * layout.piece_bytes, count * layout.piece_bytes
        return [(begin + plane * plane_bytes, length, 0) for plane in range(layout.planes)]

    return places
