"""A ZMQ broker: forwards the messages of publishers to their subscribers."""

import threading
from typing import Self

import zmq


class ZmqBroker:
    """XSUB and XPUB on loopback, in a thread."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._xsub, self._xpub = self._context.socket(zmq.XSUB), self._context.socket(zmq.XPUB)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._xsub, self._xpub)]
        self.xsub, self.xpub = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            zmq.proxy(self._xsub, self._xpub)
        except zmq.ContextTerminated:
            for socket in (self._xsub, self._xpub):
                socket.close(linger=0)

    @property
    def url(self) -> str:
        return f"xsub={self.xsub} , xpub={self.xpub}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.term()
        self._thread.join(10)
