"""Probe of a KV router whose events arrive later than the responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dynamo.ops import router_probe
from dynamo.ops.router_probe import RouterProbe

WORKERS = ("1", "2")


class ScriptedRouter:
    """Frontend in KV mode: its router has the blocks of a worker some requests after their first response."""

    def __init__(self, delay: int, *, explains: bool = True) -> None:
        self.requests: list[str] = []
        """Worker of each request."""
        self.named: list[str] = []
        self._delay = delay
        self._explains = explains

    def complete(self, model: str, messages: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        number, name = len(self.requests), options["nvext"].get("backend_instance_id")
        if name is not None:
            self.named.append(str(name))
        known = self._is_known(number)
        self.requests.append(str(name) if name is not None else WORKERS[0 if known else number % 2])
        return {"id": str(number), "choices": [{}], "nvext": {"worker_id": {"decode_worker_id": self.requests[-1]}}}

    def decisions(self, request_id: str) -> list[dict[str, Any]]:
        if not self._explains:
            return []
        worker, device = self.requests[int(request_id)], 5 if self._is_known(int(request_id)) else 0
        decision = {"worker_id": worker, "candidates": [{"worker_id": worker, "dp_rank": 0, "device": device}]}
        return [{"decisions": [decision]}]

    def _is_known(self, number: int) -> bool:
        return number > self._delay


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_probe, "EVENTS_POLL_S", 0.0)


def probed(router: ScriptedRouter) -> tuple[str, ...]:
    client: Any = router
    return RouterProbe(client, "m").observe("kv", frozenset(WORKERS), {}).repeated


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_prefix_is_repeated_once_the_router_knows_the_blocks_of_its_first_worker(delay: int) -> None:
    router = ScriptedRouter(delay)
    assert probed(router) == ("1",) * (router_probe.REPEATS + 1)
    assert router.named == ["1"] * max(1, delay + 1)


def test_router_that_explains_nothing_is_not_waited_for() -> None:
    router = ScriptedRouter(100, explains=False)
    assert set(probed(router)) == set(WORKERS)
    assert len(router.named) == 1


def test_wait_for_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_probe, "EVENTS_S", 0.0)
    router = ScriptedRouter(100)
    assert set(probed(router)) == set(WORKERS)
    assert router.named == []
