"""ResponseSession: the last response of one WebSocket connection, which a request may continue unstored. Pure."""

from collections.abc import Sequence

from dynamo.protocols.response_items import StoredItem
from dynamo.protocols.responses import Response


class ResponseSession:
    """State of one connection: one conversation, so memory is bounded by the last request."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._items: list[StoredItem] = []

    def remember(self, response: Response, input_items: Sequence[StoredItem]) -> None:
        """Keep a response with its conversation, instead of the previous one."""
        self._id, self._items = response.id, [*input_items, *response.output]

    def history(self, response_id: str) -> list[StoredItem] | None:
        """Return the conversation up to and including a response; None if it is not the last one."""
        return self._items if response_id == self._id else None

    def forget(self, response_id: str) -> None:
        """Drop a response whose continuation failed."""
        if response_id == self._id:
            self._id, self._items = None, []
