"""Outbox, with a client that accepts as much as the test allows."""

import asyncio

import pytest

from dynamo.runtime.transports.nats import outbox as module
from dynamo.runtime.transports.nats.outbox import Outbox, OutboxMessage


class Client:
    """Client that records the accepted data."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[bytes] = []
        self.error = error
        self.is_closed = False

    async def publish(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.taken.append(data)


async def sent(outbox: Outbox, client: Client) -> None:
    sending = asyncio.ensure_future(outbox.send(client))  # type: ignore[arg-type]
    await asyncio.wait({sending, asyncio.ensure_future(outbox.wait_empty())}, return_when=asyncio.FIRST_COMPLETED)
    sending.cancel()


async def test_nats_outbox_sends_in_order() -> None:
    outbox, client = Outbox(lambda _: None), Client()
    for number in range(3):
        assert outbox.put(OutboxMessage("s", b"%d" % number))
    await sent(outbox, client)
    assert client.taken == [b"0", b"1", b"2"]
    assert len(outbox) == 0


async def test_nats_outbox_drops_and_counts_messages_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNSENT_MAX", 3)
    monkeypatch.setattr(module, "UNSENT_BYTES_MAX", 10)
    dropped: list[int] = []
    outbox = Outbox(dropped.append)
    assert [outbox.put(OutboxMessage("s", bytes(size))) for size in (6, 5, 4, 0, 0)] == [True, False, True, True, False]
    assert dropped == [1, 1]
    outbox.drop_all()
    assert sum(dropped) == 5
    assert outbox.put(OutboxMessage("s", bytes(10))), "what was dropped takes no room"


async def test_nats_outbox_counts_an_unsendable_message_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    dropped: list[int] = []
    outbox, client = Outbox(dropped.append), Client(ValueError("bad subject"))
    for data in (b"bad", b"good"):
        outbox.put(OutboxMessage("s", data))
    await sent(outbox, client)
    assert (client.taken, dropped) == ([b"good"], [1])
    assert "failed to send a message to s: bad subject" in caplog.text


async def test_nats_outbox_sends_the_rest_over_the_next_connection() -> None:
    dropped: list[int] = []
    outbox, closed, client = Outbox(dropped.append), Client(ConnectionError("closed")), Client()
    closed.is_closed = True
    for data in (b"first", b"second"):
        outbox.put(OutboxMessage("s", data))
    await sent(outbox, closed)
    await sent(outbox, client)
    assert (client.taken, dropped) == ([b"first", b"second"], [])
