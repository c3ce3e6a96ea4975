"""Stand-in for the scheduler and the kubelet of one node, on a released API server: pods are bound, run and end."""

import itertools
import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx
from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.pod_status import READY, pod_address, running_status

NODE = "node-0"
PODS = "/api/v1/pods"
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
WATCH_S = 300


class NodeAgent:
    """Pod lifecycle without processes: a thread that reacts to a watch; the owner stops it."""

    def __init__(self, url: str, token: str, verify: Any) -> None:
        headers = {"Authorization": f"Bearer {token}", "User-Agent": "node-agent"}
        self._http = httpx.Client(base_url=url, headers=headers, verify=verify, timeout=30)
        self._addresses = itertools.count(1)
        self._seen: dict[str, str | None] = {}
        """Value of the annotation of readiness with which the status of each pod was last written, by uid."""
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node agent", daemon=True)

    def start(self) -> None:
        """Create the node and begin to watch."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        node = {"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}}
        self._send("POST", "/api/v1/nodes", node)
        self._send("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}}, STRATEGIC)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: the connection is closed under it."""
        self._is_stopped.set()
        self._http.close()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            try:
                listed = self._http.get(PODS).json()
                for pod in listed["items"]:
                    self._run_pod(pod)
                self._watch(listed["metadata"]["resourceVersion"])
            except (httpx.HTTPError, RuntimeError, KeyError):  # The server ends, or the client is closed.
                self._is_stopped.wait(0.1)

    def _watch(self, revision: str) -> None:
        parameters = {"watch": "1", "resourceVersion": revision, "timeoutSeconds": str(WATCH_S)}
        timeout = httpx.Timeout(10, read=WATCH_S + 10)
        with self._http.stream("GET", PODS, params=parameters, timeout=timeout) as response:
            for line in response.iter_lines():
                event = json.loads(line)
                if event["type"] in {"ADDED", "MODIFIED"}:
                    self._run_pod(event["object"])
                elif event["type"] == "DELETED":
                    self._seen.pop(event["object"]["metadata"]["uid"], None)
                else:
                    return

    def _run_pod(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if metadata.get("deletionTimestamp"):
            self._send("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}})
            return
        readiness = (metadata.get("annotations") or {}).get(READY)
        if metadata["uid"] in self._seen and self._seen[metadata["uid"]] == readiness:
            return
        if not pod["spec"].get("nodeName"):
            binding = {"metadata": {"name": metadata["name"]}, "target": {"kind": "Node", "name": NODE}}
            self._send("POST", f"{path}/binding", binding)
        self._seen[metadata["uid"]] = readiness
        ip = (pod.get("status") or {}).get("podIP") or pod_address(next(self._addresses))
        self._send("PATCH", f"{path}/status", {"status": running_status(pod, ip)}, STRATEGIC)

    def _send(self, method: str, path: str, body: Object, headers: Mapping[str, str] | None = None) -> None:
        """Send a request; the pod may have been deleted in the meantime."""
        response = self._http.request(method, path, json=body, headers=headers)
        if response.status_code >= 400 and response.status_code not in {404, 409}:
            raise RuntimeError(f"{method} {path}: {response.status_code} {response.text}")
