"""OneAnswer: the receiver of a question that is answered by a single element."""

import asyncio

from dynamo.core.errors import StreamIncomplete
from dynamo.runtime.request_plane.base import Item


class OneAnswer:
    """Receives it; whatever comes after is not minded."""

    def __init__(self, who: str) -> None:
        """`who` names the responder in errors."""
        self._who = who
        self.first: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        """The answer, or what went wrong before it came."""

    def on_token(self, token_id: int) -> None:
        """No answer to such a question is a token."""

    def on_item(self, item: Item) -> None:
        """An element."""
        if not self.first.done():
            self.first.set_result(item)

    def on_end(self) -> None:
        """There is nothing more."""
        self.on_error(StreamIncomplete(f"{self._who} ended without an answer"))

    def on_error(self, error: Exception) -> None:
        """The stream broke."""
        if not self.first.done():
            self.first.set_exception(error)
