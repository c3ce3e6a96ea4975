"""Guard that makes unit tests fail when they open network sockets; tests with sockets belong to tests/integration."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq


class SocketInUnitTest(AssertionError):
    """A unit test bound or connected a socket."""


@contextmanager
def no_sockets() -> Iterator[None]:
    """Make every bind and connect fail, but for sockets that stay inside the process."""

    def refuse(opened: socket.socket, *address: Any) -> None:
        raise SocketInUnitTest(f"{opened.family.name} {address}: move the test to tests/integration")

    def refuse_zmq(method: Any) -> Any:
        def guarded(opened: Any, address: Any, *more: Any) -> Any:
            if not str(address).startswith("inproc:"):
                raise SocketInUnitTest(f"ZMQ {address}: move the test to tests/integration")
            return method(opened, address, *more)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for name in ("bind", "connect", "connect_ex"):
            patch.setattr(socket.socket, name, refuse)
        for name in ("bind", "connect"):
            patch.setattr(zmq.Socket, name, refuse_zmq(getattr(zmq.Socket, name)))
        yield
