"""RoutedEngine and ResponseSender: types of objects that upstream's bindings pass to callbacks; not constructed."""

from collections.abc import AsyncIterator
from typing import Any, Protocol


class RoutedEngine(Protocol):
    """Engine that routes preprocessed requests to workers."""

    async def generate(self, preprocessed: Any, context: Any = None) -> AsyncIterator[Any]:
        """Route the request and return the stream of its responses."""
        ...


class ResponseSender(Protocol):
    """Sending end of a response stream."""

    def send(self, obj: Any) -> None:
        """Send an element."""

    def close(self) -> None:
        """End the stream."""

    def close_with_error(self, msg: str) -> None:
        """End the stream with an error."""
