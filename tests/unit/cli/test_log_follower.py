"""Following logs: new pods, restarts and outages lose no line and repeat none; jobs end the command."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns, until
from tests.unit.operator.kube_store import KubeStore

from dynamo.cli import log_follower
from dynamo.cli.log_follower import RETRY_S, LogFollower
from dynamo.core.clock import ManualClock
from dynamo.k8s.client import KubeUnavailable
from dynamo.k8s.kinds import PODS

Line = tuple[str, str]


class Logs(KubeStore):
    """Pods with growing logs. An ended stream returns the lines since a second, as the API server does."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[Line]] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.requests: list[str] = []
        self.is_away = False

    async def follow_pod_log(
        self, name: str, namespace: str, container: str, *, lines: int, since: str = ""
    ) -> AsyncIterator[Line]:
        at = f"{name}/{container}"
        self.requests.append(at)
        if self.is_away:
            raise KubeUnavailable("away")
        known = self.lines.setdefault(at, [])
        end = self.ends[at] = asyncio.Event()
        found = [one for one in known if one[0][:2] >= since[:2]] if since else known[-lines:]
        position = len(known)
        for line in found:
            yield line
        while not end.is_set() or position < len(known):
            if position < len(known):
                position += 1
                yield known[position - 1]
            else:
                await turns(1)

    def pod(self, name: str, phase: str = "Running", containers: tuple[str, ...] = ("main",), **labels: str) -> None:
        state = {"running": {}} if phase == "Running" else {"terminated": {}} if phase != "Pending" else {"waiting": {}}
        statuses = [{"name": one, "state": state} for one in containers]
        metadata = {"name": name, "namespace": "space", "labels": {"app": "x", **labels}}
        self.put(PODS, {"metadata": metadata, "status": {"phase": phase, "containerStatuses": statuses}})


class Subject:
    def __init__(self, **options: Any) -> None:
        self.store = Logs()
        self.clock = ManualClock()
        self.printed: list[str] = []
        self.follower = LogFollower(
            self.store, "space", "app=x", lines=2, write=self.printed.append, clock=self.clock, **options
        )

    async def later(self) -> None:
        await turns(50)
        self.clock.advance(RETRY_S)
        await turns(50)


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    made = Subject()
    task = asyncio.create_task(made.follower.run(until_ended=False))
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_last_lines_and_new_lines_of_every_container_are_printed(subject: Subject) -> None:
    subject.store.lines["p/main"] = [("01.1", "a"), ("01.2", "b"), ("01.3", "c")]
    subject.store.pod("p", containers=("main", "side"))
    await until(lambda: subject.printed == ["p/main: b", "p/main: c"])
    subject.store.lines["p/side"].append(("02.1", "d"))
    subject.store.pod("q")
    await until(lambda: "p/side: d" in subject.printed and "q/main" in subject.store.requests)


async def test_pending_pod_is_followed_once_running(subject: Subject) -> None:
    subject.store.pod("p", "Pending")
    await subject.later()
    assert subject.store.requests == []
    subject.store.pod("p")
    await until(lambda: subject.store.requests == ["p/main"])


async def test_log_stream_restart_loses_and_repeats_no_line(subject: Subject) -> None:
    lines = subject.store.lines["p/main"] = [("01.1", "a"), ("01.2", "b")]
    subject.store.pod("p")
    await until(lambda: len(subject.printed) == 2)
    lines.append(("01.2", "of the same time"))
    await until(lambda: len(subject.printed) == 3)
    subject.store.ends["p/main"].set()
    await turns(20)
    lines.append(("01.4", "c"))
    subject.store.is_away = True
    await subject.later()
    subject.store.is_away = False
    await subject.later()
    assert subject.printed == ["p/main: a", "p/main: b", "p/main: of the same time", "p/main: c"]


async def test_ended_pod_is_read_to_its_end_once(subject: Subject) -> None:
    lines = subject.store.lines["p/main"] = [("01.1", "a")]
    subject.store.pod("p")
    await until(lambda: len(subject.printed) == 1)
    lines.append(("02.1", "last"))
    subject.store.pod("p", "Succeeded")
    subject.store.ends["p/main"].set()
    for _ in range(2):
        await subject.later()
        for end in subject.store.ends.values():
            end.set()
    requests = len(subject.store.requests)
    for _ in range(3):
        await subject.later()
    assert subject.printed == ["p/main: a", "p/main: last"]
    assert len(subject.store.requests) == requests
    subject.store.remove(PODS, "space", "p")
    await turns(50)


async def test_follower_ends_with_the_pods_of_a_job() -> None:
    subject = Subject()
    subject.store.lines["p/main"] = [("01.1", "a")]
    task = asyncio.create_task(subject.follower.run(until_ended=True))
    subject.store.pod("p", "Failed")
    await until(lambda: "p/main" in subject.store.ends)
    assert not task.done()
    subject.store.ends["p/main"].set()
    await until(task.done)
    assert subject.printed == ["p/main: a"]


async def test_other_components_and_more_containers_than_the_limit_are_not_followed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_follower, "MAX_STREAMS", 1)
    subject = Subject(accepts=lambda pod: pod["metadata"]["labels"].get("part") != "other")
    task = asyncio.create_task(subject.follower.run(until_ended=False))
    subject.store.pod("o", part="other")
    subject.store.pod("p", containers=("main", "side"))
    await until(lambda: subject.store.requests == ["p/main"])
    assert "p/side: not followed: at most 1 containers are" in capsys.readouterr().err
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
