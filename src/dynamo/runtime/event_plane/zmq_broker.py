"""ZMQ brokers: publishers and subscribers connect to fixed addresses instead of to each other.

`DYN_ZMQ_BROKER_URL` is `xsub=<url>[;<url>…] , xpub=<url>[;<url>…]`, as in Dynamo. With several brokers every event is
sent through each of them and delivered once. Publishers have no records: that of their worker shows that they left.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dynamo.core.clock import Clock
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.event_plane.zmq_sockets import ZmqPublisherSocket, ZmqSubscriberSocket

FORMAT = "expected xsub=<url>[;<url>...],xpub=<url>[;<url>...]"


@dataclass(frozen=True, slots=True)
class Brokers:
    """Broker addresses for publishers and for subscribers."""

    xsub: tuple[str, ...]
    xpub: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Brokers":
        """Parse the variable. Raise `ConfigError` for text without brokers."""
        ends: dict[str, tuple[str, ...]] = {}
        for part in text.split(","):
            name, _, urls = part.strip().partition("=")
            ends[name.strip()] = tuple(url.strip() for url in urls.split(";") if url.strip())
        if set(ends) != {"xsub", "xpub"} or not all(ends.values()):
            raise ConfigError(f"DYN_ZMQ_BROKER_URL={text!r}: {FORMAT}")
        return cls(ends["xsub"], ends["xpub"])

    @classmethod
    def from_variables(cls) -> "Brokers | None":
        """Return the brokers, None where publishers are found through the registry. Raise `ConfigError`."""
        text = setting("DYN_ZMQ_BROKER_URL", "", str)
        if text:
            return cls.parse(text)
        if setting("DYN_ZMQ_BROKER_ENABLED", False, read_bool):
            raise ConfigError("DYN_ZMQ_BROKER_ENABLED: broker discovery is not supported; set DYN_ZMQ_BROKER_URL")
        return None


class BrokerPublisher(ZmqPublisherSocket):
    """Publisher connected to every broker."""

    def __init__(self, context: Any, brokers: Brokers, clock: Clock, endpoint: EndpointId, topic: str) -> None:
        super().__init__(context, clock, topic, broker_topic(endpoint, topic))
        connect(self._socket, brokers.xsub, self._socket.close)

    async def close(self) -> None:
        self._socket.close()


class BrokerSubscriber(ZmqSubscriberSocket):
    """Subscriber with one socket, connected to every broker."""

    is_sound = True

    def __init__(self, context: Any, brokers: Brokers, endpoint: EndpointId, topic: str) -> None:
        super().__init__(context, topic, broker_topic(endpoint, topic))
        connect(self._socket, brokers.xpub, self.close_socket)
        self._read()  # ZMQ signals only the first of several events: a call may have consumed the signal.

    async def close(self) -> None:
        self.close_socket()
        self.end()


def broker_topic(endpoint: EndpointId, topic: str) -> str:
    """Return the topic on brokers, which carry the events of all endpoints."""
    return f"namespace.{endpoint.namespace}.component.{endpoint.component}.endpoint.{endpoint.name}.{topic}"


def connect(socket: Any, urls: Iterable[str], close: Callable[[], None]) -> None:
    """Connect to all addresses. Raise `ConfigError` for an invalid address, after `close`."""
    import zmq

    for url in urls:
        try:
            socket.connect(url)
        except zmq.ZMQError as error:
            close()
            raise ConfigError(f"DYN_ZMQ_BROKER_URL: {url}: {error}") from None
