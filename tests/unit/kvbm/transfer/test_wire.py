"""Frames of the KV transfer: malformed and unfinished ones end in an error, within a bounded time."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from dynamo.kvbm.transfer import wire
from dynamo.kvbm.transfer.base import SourceUnreachable, TransferError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    one.settimeout(20)
    with one, other:
        yield one, other


def test_frame_returns_its_body_and_none_at_the_end(pair: Pair) -> None:
    reader, writer = pair
    body = bytes(range(256)) * 1000
    threading.Thread(target=lambda: (wire.write_frame(writer, body), writer.close())).start()
    assert wire.read_frame(reader) == body
    assert reader.gettimeout() == 20
    assert wire.read_frame(reader) is None


def test_frame_beyond_the_bound_is_refused(pair: Pair) -> None:
    reader, writer = pair
    writer.sendall(struct.pack(">I", 11))
    with pytest.raises(TransferError, match="a frame of 11 bytes: expected at most 10"):
        wire.read_frame(reader, 10)


@pytest.mark.parametrize("sent", [b"\0", b"\0\0\0\x05abc"])
def test_frame_cut_off_by_its_sender_is_an_error(pair: Pair, sent: bytes) -> None:
    reader, writer = pair
    writer.sendall(sent)
    writer.shutdown(socket.SHUT_WR)
    with pytest.raises(SourceUnreachable, match="within a frame"):
        wire.read_frame(reader)


def test_frame_that_arrives_byte_by_byte_has_a_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives well within the socket's timeout; the whole frame does not."""
    reader, writer = pair
    monkeypatch.setattr(wire, "FRAME_S", 0.2)
    writer.sendall(struct.pack(">I", 1 << 20))
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.01):
            writer.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            wire.read_frame(reader)
    finally:
        is_over.set()
        thread.join()
