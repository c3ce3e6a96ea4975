"""ResponseSession: the last response of one WebSocket connection, which the next one may continue unstored. Pure."""

from collections.abc import Sequence

from dynamo.protocols.responses import Response, StoredItem


class ResponseSession:
    """One connection. It holds one conversation, so a long connection takes no more memory than its last request."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._items: list[StoredItem] = []

    def remember(self, response: Response, asked: Sequence[StoredItem]) -> None:
        """Keep a response with the conversation that it answers, instead of the one before."""
        self._id, self._items = response.id, [*asked, *response.output]

    def history(self, response_id: str) -> list[StoredItem] | None:
        """Return the conversation up to and with a response; None if it is not the last one."""
        return self._items if response_id == self._id else None

    def forget(self, response_id: str) -> None:
        """Drop a response whose continuation failed."""
        if response_id == self._id:
            self._id, self._items = None, []
