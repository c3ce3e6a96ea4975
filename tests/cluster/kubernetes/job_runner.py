"""Stand-in for the kubelet of a node: the containers of selected pods run as processes of this machine.

Each process gets its container's variables, the account's token with the address of the API server, and volumes as
folders below one folder of the test; mount paths in arguments and variables are replaced.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.k8s.client import KubeClient
from dynamo.k8s.informer import Informer, ObjectKey
from dynamo.k8s.kinds import PODS

Object = dict[str, Any]
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
STRATEGIC = "application/strategic-merge-patch+json"
Translate = Callable[[Sequence[str]], Sequence[str]]
"""Returns the command that is executed for the command of a container."""


class JobRunner:
    """Runs the pods that match a label selector; `async with` starts it and ends its processes."""

    def __init__(
        self,
        server: KubernetesServer,
        client: KubeClient,
        folder: Path,
        labels: str,
        translate: Translate = lambda it: it,
    ) -> None:
        self._server = server
        self._client = client
        self._folder = folder
        self._translate = translate
        self._pods: dict[ObjectKey, asyncio.Task[None]] = {}
        self._informer = Informer(client, PODS, None, labels, on_change=self._on_pod)
        self._task: asyncio.Task[None] | None = None
        self.commands: list[list[str]] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._informer.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [one for one in (self._task, *self._pods.values()) if one is not None]
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_pod(self, key: ObjectKey, pod: Object | None) -> None:
        running = self._pods.get(key)
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            if running is not None:
                running.cancel()
        elif running is None:
            self._pods[key] = asyncio.create_task(self._run(pod))

    async def _run(self, pod: Object) -> None:
        """Run the containers of a pod, and report each end in its status."""
        folder = self._folder / pod["metadata"]["uid"]
        states: dict[str, Object] = {one["name"]: {"running": {}} for one in pod["spec"]["containers"]}
        await self._report(pod, "Running", states)
        async with asyncio.TaskGroup() as group:
            for container in pod["spec"]["containers"]:
                group.create_task(self._container(pod, container, folder, states))
        failed = any(one["terminated"]["exitCode"] for one in states.values())
        await self._report(pod, "Failed" if failed else "Succeeded", states)

    async def _container(self, pod: Object, container: Object, folder: Path, states: dict[str, Object]) -> None:
        mounts = {one["mountPath"]: str(folder / one["name"]) for one in container.get("volumeMounts") or ()}
        mounts[ACCOUNT] = str(self._account(folder, pod["metadata"]["namespace"]))
        _make_folders(mounts.values())
        command = [*container.get("command", ()), *container.get("args", ())]
        command = list(self._translate([mounts.get(word, word) for word in command]))
        self.commands.append(command)
        with (folder / f"{container['name']}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, env=self._environment(pod, container, mounts), stdout=log, stderr=log, cwd=folder
            )
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.send_signal(signal.SIGTERM)
                await process.wait()
                raise
        ended: Object = {"exitCode": code, "reason": "Error" if code else "Completed"}
        states[container["name"]] = {"terminated": ended}
        await self._report(pod, "Running", states)

    def _account(self, folder: Path, namespace: str) -> Path:
        account = folder / "account"
        account.mkdir(parents=True, exist_ok=True)
        assert self._server.ca, "the pods require an API server with TLS"
        (account / "token").write_text(self._server.token)
        (account / "namespace").write_text(namespace)
        (account / "ca.crt").write_bytes(self._server.ca)
        return account

    def _environment(self, pod: Object, container: Object, mounts: Mapping[str, str]) -> dict[str, str]:
        found = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.port),
        }
        for one in container.get("env") or ():
            if "value" in one:
                found[one["name"]] = mounts.get(one["value"], one["value"])
            elif "fieldRef" in one["valueFrom"]:
                found[one["name"]] = pod["metadata"][one["valueFrom"]["fieldRef"]["fieldPath"].rpartition(".")[2]]
        return found

    async def _report(self, pod: Object, phase: str, states: Mapping[str, Object]) -> None:
        metadata = pod["metadata"]
        statuses = [
            {"name": one["name"], "image": one["image"], "imageID": "", "restartCount": 0, "state": states[one["name"]],
             "ready": "running" in states[one["name"]]} for one in pod["spec"]["containers"]
        ]  # fmt: skip
        status = {"phase": phase, "containerStatuses": statuses}
        await self._client.patch(
            PODS,
            metadata["name"],
            {"status": status},
            metadata["namespace"],
            content_type=STRATEGIC,
            subresource="status",
        )


def _make_folders(paths: Iterable[str]) -> None:
    for path in paths:
        Path(path).mkdir(parents=True, exist_ok=True)
