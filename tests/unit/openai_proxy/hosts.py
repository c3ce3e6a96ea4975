"""The worker and the response sink that an engine of the proxy sees."""

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import EngineOutput

DEADLINE_S = 20.0


class Host:
    """What a worker is to its engine."""

    worker_id = 7

    def __init__(self) -> None:
        self.metrics = MetricsRegistry()
        self.loads: list[Any] = []
        self.events: list[Any] = []
        self.service: list[str] = []
        self.is_drained = False

    def publish_kv_event(self, event: Any, dp_rank: int = 0, tier: str = "device") -> None:
        self.events.append((event, dp_rank, tier))

    def publish_load(self, load: Any) -> None:
        self.loads.append(load)

    def publish_forward_pass(self, passed: Any, dp_rank: int = 0) -> None:
        raise AssertionError("a proxy knows no steps")

    def fail(self, error: BaseException) -> None:
        raise AssertionError("a proxy lives on") from error

    async def leave_service(self) -> bool:
        self.service.append("left")
        return not self.is_drained

    async def return_to_service(self) -> None:
        self.service.append("back")


class Heard:
    """A reply; `ended` is done when the answer is, with its error if it ends in one."""

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id
        self.is_cancelled = False
        self.tokens: list[int] = []
        self.items: list[Any] = []
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Whoever cancels here calls the engine."""

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
        async with asyncio.timeout(DEADLINE_S):
            return await self.ended
