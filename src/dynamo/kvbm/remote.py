"""Remote: a block manager in another process of the same engine, asked over a local socket.

vLLM's scheduler and its worker may be two processes; the blocks are where the worker is. Both know the engine's id, which
names the socket and proves who asks.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from dynamo.kvbm.logical.blocks import Identity
from dynamo.kvbm.manager import BlockManager
from dynamo.kvbm.orders import Ticket

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # An answer takes microseconds; a worker that is silent for so long is asked no more.
CLOSE_S = 2.0
LOOK_S = 0.2  # A silent connection: how soon the end is noticed.


def address_of(engine_id: str) -> str:
    """A name of this machine's, without a file."""
    return f"\0dynamo-kvbm-{engine_id}"


class ManagerServer:
    """Answers the one scheduler that an engine has."""

    def __init__(self, manager: BlockManager, engine_id: str) -> None:
        self._manager = manager
        self._tickets: dict[int, Ticket] = {}
        self._count = 0
        self._address = address_of(engine_id)
        self._listener = Listener(self._address, "AF_UNIX", authkey=engine_id.encode())
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="kvbm-remote", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answers nobody any more."""
        self._is_closed = True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            waker.settimeout(CLOSE_S)
            waker.connect(self._address)
        self._thread.join(CLOSE_S)
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                with self._listener.accept() as link:
                    while not self._is_closed:
                        if link.poll(LOOK_S):
                            name, argument = link.recv()
                            link.send(self._answer(name, argument))
            except (EOFError, OSError, AuthenticationError) as error:
                logger.info("the scheduler hung up: %s", error)

    def _answer(self, name: str, argument: Any) -> Any:
        manager = self._manager
        if name == "begin":
            ticket = manager.begin(argument)
            if ticket is None:
                return None
            self._count += 1
            self._tickets[self._count] = ticket
            return self._count
        if name == "is_over":
            return argument not in self._tickets or manager.is_over(self._tickets[argument])
        if name == "end":
            ended = self._tickets.pop(argument, None)
            return None if ended is None else manager.end(ended)
        if name == "find":
            return manager.find(argument)
        if name == "release":
            return manager.release(argument)
        return manager.clear()


class RemoteManager:
    """What a scheduler asks of the block manager. When there is no answer, nothing is found."""

    def __init__(self, engine_id: str) -> None:
        """Raises `OSError` where nobody listens yet."""
        self._link: Connection[Any, Any] | None = Client(address_of(engine_id), "AF_UNIX", authkey=engine_id.encode())

    def begin(self, identities: Sequence[Identity]) -> int | None:
        found: int | None = self._ask("begin", list(identities))
        return found

    def is_over(self, ticket: int) -> bool:
        return self._ask("is_over", ticket) is not False

    def end(self, ticket: int) -> None:
        self._ask("end", ticket)

    def find(self, hashes: Sequence[int]) -> list[int]:
        return self._ask("find", list(hashes)) or []

    def release(self, slots: Sequence[int]) -> None:
        if slots:
            self._ask("release", list(slots))

    def clear(self) -> None:
        self._ask("clear", None)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _ask(self, name: str, argument: Any) -> Any:
        if self._link is None:
            return None
        try:
            self._link.send((name, argument))
            if self._link.poll(ANSWER_S):
                return self._link.recv()
            logger.warning("the block manager does not answer: KV tiers are not used any more")
        except (EOFError, OSError) as error:
            logger.warning("the block manager is gone (%s): KV tiers are not used any more", error)
        self.close()
        return None
