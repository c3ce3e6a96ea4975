"""Outbox: messages queued for a NATS server, in order, bounded, with a counter of dropped messages."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.aio.client import Client

logger = logging.getLogger(__name__)

UNSENT_MAX = 100_000
UNSENT_BYTES_MAX = 64 << 20  # Some seconds of events of a busy worker, or four of the largest requests.


@dataclass(slots=True)
class OutboxMessage:
    """Queued message."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None


class Outbox:
    """Queue of a publisher; `send` drains it over successive connections."""

    def __init__(self, count_dropped: Callable[[int], None]) -> None:
        self._count_dropped = count_dropped
        self._messages: deque[OutboxMessage] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: OutboxMessage) -> bool:
        """Append a message; return False if it was dropped because of its size."""
        if len(self._messages) >= UNSENT_MAX or self._bytes + len(message.data) > UNSENT_BYTES_MAX:
            self._count_dropped(1)
            return False
        self._messages.append(message)
        self._bytes += len(message.data)
        self._empty.clear()
        self._filled.set()
        return True

    def drop_all(self) -> None:
        """Drop all messages: their senders have given up."""
        self._count_dropped(len(self._messages))
        self._messages.clear()
        self._bytes = 0
        self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until the last message was sent or dropped."""
        await self._empty.wait()

    async def send(self, client: "Client") -> None:
        """Send messages as fast as the server accepts them, until cancelled or the connection is closed."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._bytes -= len(message.data)
                try:
                    headers = dict(message.headers) if message.headers else None
                    await client.publish(message.subject, message.data, message.reply, headers)
                except asyncio.CancelledError:  # The connection was lost: whether the server got it is unknown.
                    self._count_dropped(1)
                    raise
                except Exception as error:  # noqa: BLE001 - the library raises many types; later messages are sent
                    if client.is_closed:
                        self._messages.appendleft(message)
                        self._bytes += len(message.data)
                        return
                    self._count_dropped(1)
                    logger.warning("failed to send a message to %s: %s", message.subject, error)
            self._empty.set()
            self._filled.clear()
            await self._filled.wait()
