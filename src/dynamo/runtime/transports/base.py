"""ServerPlane: interface of a plane that works through a server."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ServerPlane(Protocol):
    """Plane that requires a server connection."""

    async def start(self) -> None:
        """Wait for the connection. Raise `ConfigError` when the server is unreachable or rejects the credentials."""
