"""Host and reply for engines of the proxy."""

from typing import Any

from dynamo.core.metrics import MetricsRegistry

DEADLINE_S = 20.0


class Host:
    """Host of an engine."""

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
