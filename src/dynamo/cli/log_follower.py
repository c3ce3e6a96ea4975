"""Follows the logs of all containers of the pods that match a selector, through restarts, new pods and outages."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.tasks import TaskOwner
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.informer import Informer, ObjectKey, ObjectSource
from dynamo.k8s.kinds import PODS
from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

RETRY_S = 1.0
MAX_STREAMS = 200
"""Containers that are followed at the same time: each holds a connection to the API server."""
ENDED = frozenset({"Succeeded", "Failed"})


class FollowedContainer(NamedTuple):
    """One container of one pod."""

    pod: ObjectKey
    uid: str
    name: str

    @property
    def label(self) -> str:
        """Names of pod and container, before each line."""
        return f"{self.pod[1]}/{self.name}"


class LogSource(ObjectSource, Protocol):
    """Lists and watches pods and reads their logs: `KubeClient`, or a fake in tests."""

    def follow_pod_log(
        self, name: str, namespace: str, container: str, *, lines: int, since: str = ""
    ) -> AsyncIterator[tuple[str, str]]: ...


class LogFollower:
    """Prints the lines of the selected pods as they are written."""

    def __init__(
        self,
        source: LogSource,
        namespace: str,
        selector: str,
        *,
        lines: int,
        accepts: Callable[[KubeObject], bool] = lambda _: True,
        write: Callable[[str], object] = print,
        clock: Clock | None = None,
    ) -> None:
        """Begin with the last `lines` of each container of the pods that `accepts` returns True for."""
        self._source = source
        self._namespace = namespace
        self._lines = lines
        self._accepts = accepts
        self._write = write
        self._clock = clock or SystemClock()
        self._pods = Informer(source, PODS, namespace, selector, on_change=self._on_pod, clock=self._clock)
        self._tasks = TaskOwner("log follower")
        self._active: set[FollowedContainer] = set()
        self._done: set[FollowedContainer] = set()
        """Containers of pods that have ended and still exist."""
        self._changed = asyncio.Event()

    async def run(self, *, until_ended: bool) -> None:
        """Follow until cancelled or, with `until_ended`, until every pod has ended and its log is printed."""
        self._tasks.supervise(self._pods.run, "pods", clock=self._clock)
        try:
            while not (until_ended and self._has_ended):
                self._changed.clear()
                await self._changed.wait()
        finally:
            await self._tasks.cancel_and_wait()

    @property
    def _has_ended(self) -> bool:
        pods = [one for one in self._pods.objects.values() if self._accepts(one)]
        return bool(pods) and not self._active and all(_phase(one) in ENDED for one in pods)

    def _on_pod(self, key: ObjectKey, pod: KubeObject | None) -> None:
        self._changed.set()
        if pod is None:
            self._done = {one for one in self._done if one.pod != key}
            return
        if not self._accepts(pod):
            return
        status = part(pod, "status")
        for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
            container = FollowedContainer(key, pod["metadata"]["uid"], str(one.get("name")))
            if container in self._active or container in self._done or not _has_started(one):
                continue
            if len(self._active) >= MAX_STREAMS:
                sys.stderr.write(f"{container.label}: not followed: at most {MAX_STREAMS} containers are\n")
                continue
            self._active.add(container)
            self._tasks.start(self._follow(container), f"log of {container.label}")

    async def _follow(self, container: FollowedContainer) -> None:
        """Print the lines of a container, of its later runs too, until its pod has ended or is gone."""
        since, is_last = "", False
        try:
            while not is_last:
                is_last = self._is_over(container)  # What was written before is read once more.
                since = await self._print(container, since)
                if not is_last:
                    await self._clock.sleep(RETRY_S)
            if container.pod in self._pods.objects:
                self._done.add(container)
        finally:
            self._active.discard(container)
            self._changed.set()

    async def _print(self, container: FollowedContainer, since: str) -> str:
        """Print the lines after a time; return the time of the last one. The server rounds the time to seconds."""
        name, known = container.pod[1], since
        try:
            stream = self._source.follow_pod_log(name, self._namespace, container.name, lines=self._lines, since=since)
            async with aclosing(stream) as lines:  # type: ignore[type-var]
                async for time, text in lines:
                    if time > known:
                        self._write(f"{container.label}: {text}")
                        since = time
        except (KubeRefused, KubeUnavailable):
            pass  # The container has not started again yet, its pod is gone, or the server is away.
        return since

    def _is_over(self, container: FollowedContainer) -> bool:
        pod = self._pods.objects.get(container.pod)
        return pod is None or pod["metadata"]["uid"] != container.uid or _phase(pod) in ENDED


def _phase(pod: KubeObject) -> str:
    return str(part(pod, "status").get("phase") or "")


def _has_started(status: KubeObject) -> bool:
    state = part(status, "state")
    return "running" in state or "terminated" in state or bool(part(status, "lastState"))
