"""Sidecar of the profiler: publishes its progress and its result in a ConfigMap until the profiler's container has ended.

The text of this module is the sidecar's program, in the image of the profiler: it uses the standard library and PyYAML,
which every image with the profiler has, and nothing of this package. `reconcile.requests.copier` makes the container.
"""

import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

POLL_S = 2.0
"""Interval at which the status file is read; requests are sent for changes only."""
CHECK_S = 6.0
"""Interval of the requests for the state of the pod."""
REQUEST_S = 10.0
PUBLISH_S = 1800.0
"""Time for which the result is sent again while the API server is away."""
FILES = ("final_config.yaml", "profiler_status.yaml", "webui_data.json")
MAX_BYTES = 900_000
"""Limit of the published files together; a ConfigMap holds 1 MiB."""
PROFILER, MANAGER = "profiler", "output-copier"
Call = Callable[[str, str, Any], Any]
"""Sends a request with a method, a path and a body; returns the response. Raises `OSError` for a failure."""


def call_api(method: str, path: str, body: Any) -> Any:
    """Send a request to the API server with the token of the pod's account, which is read again because it expires."""
    account = Path(os.environ["ACCOUNT_PATH"])
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    url = f"https://[{host}]:{port}{path}" if ":" in host else f"https://{host}:{port}{path}"
    headers = {"Authorization": "Bearer " + (account / "token").read_text().strip()}
    if body is not None:
        headers["Content-Type"] = "application/apply-patch+yaml"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - the address of the API server
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=REQUEST_S, context=context) as response:  # noqa: S310
        return json.load(response)


def reported(folder: Path) -> dict[str, str]:
    """Return the fields of the profiler's status file; empty while there is none, or while it is being written."""
    try:
        found = yaml.safe_load((folder / "profiler_status.yaml").read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def result_files(folder: Path) -> dict[str, str]:
    """Return the profiler's files by name, without those that would exceed the limit."""
    found: dict[str, str] = {}
    left = MAX_BYTES
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > left:
            print(f"{name}: {path.stat().st_size} bytes exceed the limit of a ConfigMap; not published", flush=True)
            continue
        found[name] = path.read_text(errors="replace")
        left -= len(found[name].encode())
    return found


def has_ended(call: Call, namespace: str, pod: str) -> bool:
    """Return whether the profiler's container has ended; True also if its pod is gone."""
    try:
        status = call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}", None).get("status") or {}
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False  # Asked again at the next check.
    states = {one["name"]: one.get("state") or {} for one in status.get("containerStatuses") or ()}
    return "terminated" in states.get(PROFILER, {})


class OutputCopier:
    """Copies the output of one profiling job."""

    def __init__(self, call: Call, environment: dict[str, str]) -> None:
        self._call = call
        self._folder = Path(environment["OUTPUT_PATH"])
        self._name, self._namespace = environment["OUTPUT_NAME"], environment["DGDR_NAMESPACE"]
        self._pod = environment["POD_NAME"]
        self._metadata = json.loads(environment["OUTPUT_METADATA"])["metadata"]
        self._published: dict[str, str] = {}

    def publish(self, files: dict[str, str]) -> bool:
        """Write phase, message and files if they differ from the last ones. Return False for a failed request."""
        status = reported(self._folder)
        data = {"phase": status.get("phase", ""), "message": status.get("message", ""), **files}
        if data == self._published:
            return True
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {**self._metadata, "name": self._name, "namespace": self._namespace},
            "data": data,
        }
        path = f"/api/v1/namespaces/{self._namespace}/configmaps/{self._name}?fieldManager={MANAGER}&force=true"
        try:
            self._call("PATCH", path, body)
        except OSError as error:
            print(f"cannot write ConfigMap {self._name}: {error}", flush=True)
            return False
        self._published = data
        return True

    def run(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """Publish until the profiler has ended. Return the exit status: 0 if it succeeded and its result is published."""
        since_check = 0.0
        while True:
            if reported(self._folder).get("phase"):
                self.publish({})
            sleep(POLL_S)
            since_check += POLL_S
            if since_check >= CHECK_S:
                since_check = 0.0
                if has_ended(self._call, self._namespace, self._pod):
                    break
        outcome = self._outcome()
        for _ in range(int(PUBLISH_S / CHECK_S)):
            if self.publish({**outcome, **result_files(self._folder)}):
                break
            sleep(CHECK_S)
        else:
            return 1
        if outcome["profiler_status"] == "success":
            return 0
        print(f"the profiler has failed: {outcome['profiler_error']}", flush=True)
        return 1

    def _outcome(self) -> dict[str, str]:
        """Return how the profiler ended, which may be without a status."""
        status = reported(self._folder)
        if status.get("status") == "success":
            return {"profiler_status": "success"}
        cause = status.get("error") or status.get("message") or "it ended without a status"
        return {"profiler_status": "failed", "profiler_error": cause}


def main() -> int:
    """Copy until the profiler has ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The first process of a container has no default handler.
    return OutputCopier(call_api, dict(os.environ)).run()


if __name__ == "__main__":
    sys.exit(main())
