"""TCP: blocks over TCP connections between hosts, secured as the request plane is."""

import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence

from dynamo.core.boundaries import Rollback
from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Pair,
    Region,
    SourceUnreachable,
    TransferError,
    TransferOffer,
    TransferTimeout,
    Transport,
)
from dynamo.runtime.request_plane.tcp.tls import TcpTls

KEPT_MAX = 4  # Idle connections per source; the number of concurrent pulls of this process.
SOURCES_MAX = 256  # Sources with idle connections.
PLAIN = TcpTls()


class TcpPuller:
    """`PullMember` for TCP. Connections are reused for later pulls."""

    transport = Transport.TCP

    def __init__(self, region: Region, tls: TcpTls = PLAIN, *, is_checked: bool = False) -> None:
        self._region = region
        self._tls = tls
        self._is_checked = is_checked
        self._idle: dict[str, deque[socket.socket]] = {}
        self._guard = threading.Lock()
        self._is_closed = False

    def pull(self, descriptor: Descriptor, offer: TransferOffer, pairs: Sequence[Pair], deadline: Deadline) -> None:
        places = [place for place, _ in pairs]
        blocks = [block for _, block in pairs]
        batch = wire.batch_of(self._region)
        question = wire.Pull(descriptor.transfer_id, places, batch, self._is_checked)
        link, answer = self._request(offer.address, question, deadline)
        with Rollback(link.close):
            _check_granted(answer, len(blocks) * self._region.layout.block_bytes)
            wire.receive_blocks(link, self._region, blocks, batch, deadline, is_checked=self._is_checked)
        self._keep(offer.address, link)

    def release(self, descriptor: Descriptor, offer: TransferOffer) -> None:
        with contextlib.suppress(TransferError):  # The source then releases them when the lease expires.
            self.request(offer, wire.Release(descriptor.transfer_id), Deadline.after(2.0))

    def request(self, offer: TransferOffer, question: wire.Question, deadline: Deadline) -> wire.Answer:
        """Send a request that is answered by a single message. Raise `TransferError`."""
        link, answer = self._request(offer.address, question, deadline)
        self._keep(offer.address, link)
        return answer

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            links = [link for kept in self._idle.values() for link in kept]
            self._idle.clear()
        for link in links:
            link.close()

    def _request(self, address: str, question: wire.Question, deadline: Deadline) -> tuple[socket.socket, wire.Answer]:
        """Send a request; if a kept connection turns out to be closed, use a new one."""
        kept = self._take(address)
        if kept is not None:
            with contextlib.suppress(SourceUnreachable), Rollback(kept.close):
                return kept, wire.request(kept, question, deadline)
        link = self._connect(address, deadline)
        with Rollback(link.close):
            return link, wire.request(link, question, deadline)

    def _connect(self, address: str, deadline: Deadline) -> socket.socket:
        host, _, port = address.rpartition(":")
        try:
            timeout_s = deadline.left()
            link = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls.client is None:
                return link
            self._tls.refresh()
            link.settimeout(min(timeout_s, self._tls.handshake_timeout_s))
            return self._tls.client.wrap_socket(link, server_hostname=self._tls.server_name or host.strip("[]"))
        except TimeoutError:
            raise TransferTimeout(f"the source at {address} did not accept the connection in time") from None
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
            reason = error.reason if isinstance(error, ssl.SSLError) else error
            raise SourceUnreachable(f"cannot connect to the source at {address}: {reason}") from None

    def _take(self, address: str) -> socket.socket | None:
        with self._guard:
            kept = self._idle.get(address)
            if not kept:
                return None
            link = kept.pop()
            if not kept:
                del self._idle[address]
            return link

    def _keep(self, address: str, link: socket.socket) -> None:
        with self._guard:
            kept = self._idle.get(address)
            if kept is None and not self._is_closed and len(self._idle) < SOURCES_MAX:
                kept = self._idle[address] = deque()
            if kept is not None and len(kept) < KEPT_MAX and not self._is_closed:
                kept.append(link)
                return
        link.close()


def _check_granted(answer: wire.Answer, size: int) -> None:
    if not isinstance(answer, wire.Granted):
        raise TransferError("unexpected message from the source")
    if answer.size != size:
        raise TransferError(f"the source sends {answer.size} bytes, {size} were requested")
