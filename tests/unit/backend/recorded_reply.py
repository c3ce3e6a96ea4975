"""Replies of engines under test."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from dynamo.protocols.engine import EngineOutput

DEADLINE_S = 30.0


class RecordedReply:
    """Reply that records the engine's output; `ended` completes with the response, with its error if it has one."""

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id
        self.is_cancelled = False
        self.tokens: list[int] = []
        self.items: list[Any] = []
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Cancelling here calls the engine."""

    def token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def item(self, value: Any) -> None:
        self.items.append(value)
        if isinstance(value, EngineOutput):
            self.tokens += value.token_ids

    def finish(self) -> None:
        self.ended.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.ended.set_result(error)

    async def end(self) -> BaseException | None:
        """Wait for the end of the answer and return its error."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.ended


class SubmittingEngine(Protocol):
    """Engine that answers through a reply."""

    def submit(self, request: Any, reply: Any) -> None: ...


async def answered(engine: SubmittingEngine, request: Any) -> tuple[RecordedReply, BaseException | None]:
    """Submit a request, wait for the end of its answer, and return the reply and the error."""
    reply = RecordedReply()
    engine.submit(request, reply)
    return reply, await reply.end()
