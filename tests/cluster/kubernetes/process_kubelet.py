"""A kubelet whose containers are processes of this machine: each pod has a loopback address and its account's rights."""

import base64
import os
import shlex
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from tests.cluster.kubernetes.kubeconfig import write_kubeconfig
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.processes import stop_process
from tests.kubelet import expand

ROOT = Path(__file__).parents[3]
POLL_S = 0.2
MERGE = {"content-type": "application/merge-patch+json"}
HOSTS = (
    "DYN_HTTP_HOST", "DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST",
)  # fmt: skip
"""Variables that make a process listen at its pod's address; on a cluster each pod has a network of its own."""
Object = dict[str, Any]


@dataclass(slots=True)
class RunningPod:
    """A pod and its processes."""

    pod: Object
    ip: str
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    phase: str = ""
    is_ready: bool = False


class ProcessKubelet:
    """Starts the pods of an API server; the owner of the block ends them."""

    def __init__(self, server: KubernetesServer, folder: Path, adapt: Callable[[list[str], str], list[str]]) -> None:
        """`adapt` changes a command for an address, such as that of the health server."""
        self._server, self._folder, self._adapt = server, folder, adapt
        verify = ssl.create_default_context(cadata=server.ca.decode()) if server.ca else True
        headers = {"Authorization": f"Bearer {server.token}"}
        self.http = httpx.Client(base_url=server.url, headers=headers, verify=verify, timeout=30)
        self.running: dict[str, RunningPod] = {}
        self._addresses = 1
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        assert server.controllers is not None
        server.controllers.runs_pods = False
        server.server.api.allows_loopback = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_stopped.set()
        self._thread.join(30)
        for one in self.running.values():
            for process in one.processes:
                process.terminate()
        for one in self.running.values():
            for process in one.processes:
                stop_process(process)
        self.http.close()

    def pods(self, prefix: str) -> list[RunningPod]:
        """Return the ready pods whose names begin so."""
        return [one for one in list(self.running.values()) if one.is_ready and name_of(one.pod).startswith(prefix)]

    def logs(self) -> str:
        """Return the end of each log."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def _run(self) -> None:
        while not self._is_stopped.wait(POLL_S):
            present = {one["metadata"]["uid"]: one for one in self.http.get("/api/v1/pods").json()["items"]}
            for uid in [uid for uid in self.running if uid not in present]:
                for process in self.running.pop(uid).processes:
                    process.terminate()
                    threading.Thread(target=stop_process, args=(process,), daemon=True).start()
            for uid, pod in present.items():
                if uid not in self.running:
                    self.running[uid] = self._start(pod)
                self._report(self.running[uid])

    def _start(self, pod: Object) -> RunningPod:
        self._addresses += 1
        made = RunningPod(pod, f"127.0.77.{self._addresses}")
        for container in pod["spec"]["containers"]:
            made.processes.append(self._start_container(pod, container, made.ip))
        return made

    def _start_container(self, pod: Object, container: Object, ip: str) -> "subprocess.Popen[bytes]":
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        variables = self._variables(pod, container, ip)
        words = [expand(one, variables) for one in [*container.get("command", []), *container.get("args", [])]]
        if words[:1] == ["python3"]:
            words[0] = sys.executable
        elif words[:2] in (["/bin/sh", "-c"], ["/bin/bash", "-c"]):
            words = [*words[:2], words[2].replace("python3 ", shlex.quote(sys.executable) + " "), *words[3:]]
        words = self._adapt(words, ip)
        account = pod["spec"].get("serviceAccountName") or "default"
        token = self._server.server.account_token(namespace, account)
        config = write_kubeconfig(
            self._folder / f"{namespace}-{account}.kubeconfig", self._server.url, token, self._server.ca, namespace
        )
        inherited = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        own = {"KUBECONFIG": str(config), "PYTHONPATH": str(ROOT), **dict.fromkeys(HOSTS, ip)}
        with open(self._folder / f"{name}-{container['name']}.log", "ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
                env={**inherited, **variables, **own},
            )  # fmt: skip

    def _variables(self, pod: Object, container: Object, ip: str) -> dict[str, str]:
        found = {}
        for one in container.get("env", []):
            source = one.get("valueFrom") or {}
            if "fieldRef" in source:
                path = source["fieldRef"]["fieldPath"]
                found[one["name"]] = ip if path == "status.podIP" else str(_at(pod, path))
            elif "secretKeyRef" in source:
                found[one["name"]] = self._secret(pod["metadata"]["namespace"], source["secretKeyRef"])
            else:
                found[one["name"]] = expand(one.get("value", ""), found)
        return found

    def _secret(self, namespace: str, reference: Object) -> str:
        answer = self.http.get(f"/api/v1/namespaces/{namespace}/secrets/{reference['name']}")
        return base64.b64decode((answer.json().get("data") or {}).get(reference["key"], "")).decode()

    def _report(self, one: RunningPod) -> None:
        """Write the pod's status if it changed."""
        ended = [process.poll() for process in one.processes]
        if one.pod["spec"].get("restartPolicy") == "Never" and None not in ended:
            phase = "Failed" if any(ended) else "Succeeded"
        else:
            phase = "Running"
        is_ready = phase == "Running" and ended == [None] * len(ended) and self._is_ready(one)
        if (phase, is_ready) == (one.phase, one.is_ready):
            return
        one.phase, one.is_ready = phase, is_ready
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        conditions = [{"type": kind, "status": str(is_ready or kind == "PodScheduled")} for kind in kinds]
        states = [
            {"running": {"startedAt": now()}} if code is None else {"terminated": {"exitCode": code}} for code in ended
        ]
        statuses = [
            {"name": container["name"], "image": container["image"], "imageID": "", "ready": is_ready, "restartCount": 0, "state": state}
            for container, state in zip(one.pod["spec"]["containers"], states, strict=True)
        ]  # fmt: skip
        status = {
            "phase": phase, "podIP": one.ip, "podIPs": [{"ip": one.ip}], "conditions": conditions,
            "containerStatuses": statuses,
        }  # fmt: skip
        path = f"/api/v1/namespaces/{one.pod['metadata']['namespace']}/pods/{name_of(one.pod)}/status"
        self.http.patch(path, json={"status": status}, headers=MERGE)

    @staticmethod
    def _is_ready(one: RunningPod) -> bool:
        """Evaluate the readiness probes, which are requests."""
        for container in one.pod["spec"]["containers"]:
            probe = container.get("readinessProbe")
            if probe is None:
                continue
            if "grpc" in probe:
                if not _is_serving(f"{one.ip}:{probe['grpc']['port']}", probe["grpc"].get("service", "")):
                    return False
                continue
            got = probe["httpGet"]
            named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
            port = named.get(got["port"], got["port"])
            try:
                answer = httpx.get(f"http://{one.ip}:{port}{got['path']}", timeout=2)
            except httpx.TransportError:
                return False
            if answer.status_code != 200:
                return False
        return True


def _is_serving(address: str, service: str) -> bool:
    """Call a gRPC health service; imported here, because gRPC does not share a process with most other tests."""
    import grpc

    from dynamo.grpc.health import CLASSES, HEALTH_SERVICE, SERVING

    request = CLASSES["HealthCheckRequest"](service=service).SerializeToString()
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check", response_deserializer=CLASSES["HealthCheckResponse"].FromString
        )
        try:
            return bool(check(request, timeout=2).status == SERVING)
        except grpc.RpcError:
            return False


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = (value or {}).get(name)
    return "" if value is None else value


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
