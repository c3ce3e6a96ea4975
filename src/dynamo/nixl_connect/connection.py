"""A NIXL agent of this process, and the agents of other processes that it has loaded."""

import base64
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Self


def nixl_agent(name: str) -> Any:
    """Return a NIXL agent. Raise `ImportError` with the command that installs NIXL."""
    try:
        from nixl._api import nixl_agent as make
    except ImportError as error:
        raise ImportError(f"dynamo.nixl_connect requires NIXL: pip install nixl ({error})") from None
    return make(name)


class Connection:
    """A NIXL agent, shared by the operations of a connector."""

    def __init__(self, connector: Any, number: int) -> None:
        check_type("number", number, int)
        if number < 1:
            raise ValueError(f"number {number}: connections are numbered from 1")
        self._connector = connector
        self._nixl = nixl_agent(f"{connector.name}-{number}")
        self._name = f"{connector.name}-{number}"
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()  # Operations are released by the garbage collector, on any thread.

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r})"

    def __str__(self) -> str:
        return self._name

    @property
    def connector(self) -> Any:
        """The connector."""
        return self._connector

    @property
    def metadata(self) -> bytes:
        """The agent's metadata, for other processes."""
        metadata: bytes = self._nixl.get_agent_metadata()
        return metadata

    @property
    def name(self) -> str:
        """Name of the agent."""
        return self._name

    def acquire_remote_ref(self, name: str) -> None:
        """Count a use of a remote agent."""
        with self._lock:
            self._uses.update([name])

    def release_remote_ref(self, name: str) -> bool:
        """Return whether this was the last use of a remote agent."""
        with self._lock:
            uses = self._uses.pop(name, 0)
            if uses > 1:
                self._uses[name] = uses - 1
        return uses == 1

    async def initialize(self) -> None:
        """Return at once: the agent is ready."""


class Remote:
    """The agent of another process, loaded until the last use ends."""

    def __init__(self, connection: Connection, nixl_metadata: bytes | str) -> None:
        self._end: Callable[[], None] | None = None
        check_type("connection", connection, Connection)
        check_type("nixl_metadata", nixl_metadata, bytes, str)
        if not nixl_metadata:
            raise ValueError("nixl_metadata is empty")
        packed = decode_metadata(nixl_metadata) if isinstance(nixl_metadata, str) else nixl_metadata
        name: bytes | str = connection._nixl.add_remote_agent(packed)
        self._name = name if isinstance(name, str) else name.decode()
        self._connection = connection
        connection.acquire_remote_ref(self._name)
        self._end = weakref.finalize(self, _forget, connection, self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def __repr__(self) -> str:
        return f"Remote(name={self._name}, connection={self._connection.name})"

    def __str__(self) -> str:
        return self._name

    def _release(self) -> None:
        """End this use of the remote agent; the first call counts."""
        if self._end is not None:
            self._end()

    @property
    def connection(self) -> Connection:
        """The local agent."""
        return self._connection

    @property
    def name(self) -> str:
        """Name of the remote agent."""
        return self._name


def _forget(connection: Connection, name: str) -> None:
    """End a use of a remote agent, and unload the agent after the last one."""
    if connection.release_remote_ref(name):
        connection._nixl.remove_remote_agent(name)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise `TypeError` for a value of another type."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is of type {type(value).__name__}: expected {expected}")


def encode_metadata(metadata: bytes, hex_encode: bool) -> str:
    """Return an agent's metadata, compressed, as text."""
    packed = zlib.compress(metadata)
    return packed.hex() if hex_encode else "b64:" + base64.b64encode(packed).decode()


def decode_metadata(text: str) -> bytes:
    """Return the agent's metadata in text."""
    packed = base64.b64decode(text[4:]) if text.startswith("b64:") else bytes.fromhex(text)
    return zlib.decompress(packed)
