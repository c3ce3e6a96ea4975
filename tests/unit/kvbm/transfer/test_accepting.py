"""The accept loop survives every `OSError` until its server closes."""

import errno
import socket
import threading
from typing import cast

from dynamo.kvbm.transfer.accepting import accept_connections


class FakeListener:
    """Listener that raises and returns prepared values; closes the server at the end."""

    def __init__(self, outcomes: list[OSError | socket.socket], is_closed: threading.Event) -> None:
        self.outcomes = outcomes
        self.is_closed = is_closed

    def accept(self) -> tuple[socket.socket, str]:
        if not self.outcomes:
            self.is_closed.set()
            raise OSError(errno.EINVAL, "closed")
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome, ""


def test_accept_loop_continues_after_every_os_error() -> None:
    is_closed, taken = threading.Event(), list[socket.socket]()
    is_closed.wait = lambda timeout=None: False  # type: ignore[method-assign]
    first, second = socket.socket(), socket.socket()
    numbers = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.EPERM)
    errors: list[OSError | socket.socket] = [OSError(number, "failed") for number in numbers]
    listener = FakeListener([*errors, first, *errors, second], is_closed)
    accept_connections(cast("socket.socket", listener), is_closed, taken.append, "of the test")
    assert taken == [first, second]
    first.close()
    second.close()


def test_accept_loop_ends_when_its_server_closes() -> None:
    is_closed = threading.Event()
    is_closed.set()
    accept_connections(cast("socket.socket", FakeListener([], is_closed)), is_closed, lambda _: None, "of the test")
