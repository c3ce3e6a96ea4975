"""NIXL: blocks read out of a source's memory by NVIDIA's transfer library, where that is installed.

A read asks nothing of the source, so nothing tells it that the blocks are being read. Whether they were held to the
end is asked afterwards, with the release; what the source does not confirm is not believed.
"""

import contextlib
import importlib.util
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    NotHeld,
    Offer,
    Pair,
    Region,
    SourceUnreachable,
    TransferError,
    Transport,
    pair_runs,
)
from dynamo.kvbm.transfer.tcp import TcpPuller

BACKEND = "UCX"
MEMORY = "DRAM"
LINGER_S = 5.0  # For what nobody waits for any more.
POLL_FIRST_S, POLL_MAX_S = 5e-5, 2e-3  # Small transfers take tens of microseconds; long ones need no haste.


def is_available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("nixl") is not None


class NixlAgent:
    """Our end of NIXL: an agent with one region of memory."""

    def __init__(self, region: Region) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self.name = f"dynamo-{secrets.token_hex(8)}"
        self.region = region
        self._agent: Any = nixl_agent(self.name, nixl_agent_config(backends=[BACKEND]))
        self.address: int = region.flat.ctypes.data
        self._registered: Any = self._agent.register_memory([(self.address, region.flat.nbytes, 0, "")], MEMORY)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._guard = threading.Lock()
        """The library's objects are one thread's at a time."""

    def description(self) -> wire.AgentIs:
        """What others must know to read here."""
        return wire.AgentIs(self.name, self.metadata, self.address, self.region.flat.nbytes)

    def meet(self, other: wire.AgentIs) -> None:
        """Makes another agent known. Raises `TransferError`."""
        with self._guard:
            try:
                self._agent.add_remote_agent(other.metadata)
            except Exception as error:
                raise SourceUnreachable(f"NIXL does not take the source's metadata: {error}") from None

    def forget(self, name: str) -> None:
        """The other agent has ended."""
        with self._guard, contextlib.suppress(Exception):
            self._agent.remove_remote_agent(name)

    def read(self, other: wire.AgentIs, pairs: Sequence[Pair], deadline: Deadline) -> None:
        """Copies blocks of the other's region. Raises `TransferError`."""
        theirs, ours = _places(self.region, other.size), _places(self.region, self.region.flat.nbytes)
        remote = [place for there, _, count in pair_runs(pairs) for place in theirs(there, count, other.address)]
        local = [place for _, here, count in pair_runs(pairs) for place in ours(here, count, self.address)]
        handle: Any = None
        try:
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
        except TransferError:
            raise
        except Exception as error:  # The library's errors have no common ancestor.
            raise SourceUnreachable(f"NIXL: {error}") from None
        finally:
            if handle is not None:
                self._finish(handle)
        if state != "DONE":
            raise SourceUnreachable(f"NIXL: the transfer ended as {state}")

    def _finish(self, handle: Any) -> None:
        """Gives a transfer up. One that still runs writes into our blocks: it is given some time to end."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            while self._agent.check_xfer_state(handle) == "PROC" and time.monotonic() < until:
                time.sleep(POLL_MAX_S)
        with self._guard, contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Takes the memory out of the library's books."""
        with self._guard, contextlib.suppress(Exception):
            self._agent.deregister_memory(self._registered)


class NixlPuller:
    """`PullMember` by NIXL; agents meet over the source's TCP port."""

    transport = Transport.NIXL

    def __init__(self, agent: NixlAgent, tcp: TcpPuller) -> None:
        self._agent = agent
        self._tcp = tcp
        self._known: dict[str, wire.AgentIs] = {}
        self._guard = threading.Lock()

    def pull(self, descriptor: Descriptor, offer: Offer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        other = self._met(descriptor, offer, deadline)
        of_source = [(descriptor.blocks[place], block) for place, block in pairs]
        blocks = other.size // descriptor.layout.block_bytes
        if any(not 0 <= theirs < blocks for theirs, _ in of_source):
            raise TransferError("the descriptor names blocks that the source does not have")
        try:
            self._agent.read(other, of_source, deadline)
        except SourceUnreachable:
            self._forget(offer, other)
            raise
        answer = self._tcp.ask(offer, wire.Release(descriptor.transfer_id), deadline)
        if not isinstance(answer, wire.Released) or not answer.was_held:
            raise NotHeld("the source gave the blocks up while they were read")

    def release(self, descriptor: Descriptor, offer: Offer) -> None:
        self._tcp.release(descriptor, offer)

    def close(self) -> None:
        with self._guard:
            self._known.clear()

    def _met(self, descriptor: Descriptor, offer: Offer, deadline: Deadline) -> wire.AgentIs:
        with self._guard:
            known = self._known.get(offer.address)
        if known is not None:
            return known
        answer = self._tcp.ask(offer, wire.Agent(descriptor.transfer_id), deadline)
        if not isinstance(answer, wire.AgentIs):
            raise TransferError("the source answered something else")
        if not answer.size or answer.size % descriptor.layout.block_bytes:
            raise TransferError("the source's memory is not a whole number of blocks")
        with self._guard:
            known = self._known.get(offer.address)
            if known is None:
                self._agent.meet(answer)
                self._known[offer.address] = known = answer
        return known

    def _forget(self, offer: Offer, other: wire.AgentIs) -> None:
        with self._guard:
            if self._known.pop(offer.address, None) is not None:
                self._agent.forget(other.name)


def _places(region: Region, size: int) -> Any:
    """Where consecutive blocks lie in memory of that size, plane by plane, as NIXL is told."""
    layout = region.layout
    plane_bytes = size // layout.planes

    def places(first: int, count: int, address: int) -> list[tuple[int, int, int]]:
        begin, length = address + first * layout.piece_bytes, count * layout.piece_bytes
        return [(begin + plane * plane_bytes, length, 0) for plane in range(layout.planes)]

    return places
