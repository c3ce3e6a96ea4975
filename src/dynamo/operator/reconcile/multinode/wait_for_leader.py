"""Init container in which a worker waits for the leader's port, and the ConfigMap with its script."""

from dynamo.operator.reconcile.multinode.nodes import NodeGroup
from dynamo.operator.reconcile.names import GRAPH, GraphContext
from dynamo.protocols.kubernetes.common import KubeObject

CONTAINER, VOLUME, DIRECTORY, KEY = "wait-for-leader-mp", "wait-leader-script", "/scripts", "wait-for-leader.py"
SCRIPT = '''\
"""Wait until the leader's pod runs and its port accepts connections.

The pod is looked up by its address, because the name can resolve to a pod that is being deleted. Without permission to
read pods, the connection alone decides.
"""

import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
HOST, PORT = os.environ["LEADER_HOST"], int(os.environ["LEADER_PORT"])
INTERVAL_S, REPORT_S, CONNECT_S, REQUEST_S = 5, 30, 2, 5


def read(name):
    with open(f"{ACCOUNT}/{name}", encoding="utf-8") as file:
        return file.read().strip()


def pods_at(address):
    url = f"https://kubernetes.default.svc/api/v1/namespaces/{read('namespace')}/pods?fieldSelector=status.podIP={address}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {read('token')}"})
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with urllib.request.urlopen(request, context=context, timeout=REQUEST_S) as response:
        return json.load(response)["items"]


def reason_to_wait():
    try:
        address = socket.gethostbyname(HOST)
    except OSError as error:
        return f"cannot resolve the name: {error}"
    try:
        pods = pods_at(address)
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot read the leader's pod: {error}; checking the port only", flush=True)
    else:
        current = [one for one in pods if "deletionTimestamp" not in one["metadata"]]
        if not any(one.get("status", {}).get("phase") == "Running" for one in current):
            return f"no running pod has the address {address}"
    try:
        socket.create_connection((address, PORT), timeout=CONNECT_S).close()
    except OSError as error:
        return f"cannot connect to {address}: {error}"
    return None


def main():
    start = reported = time.monotonic()
    print(f"waiting for the leader at {HOST}:{PORT}", flush=True)
    while reason := reason_to_wait():
        now = time.monotonic()
        if now - reported >= REPORT_S:
            reported = now
            print(f"still waiting for {HOST}:{PORT} after {now - start:.0f} s: {reason}", flush=True)
        time.sleep(INTERVAL_S)
    print(f"the leader accepts connections after {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
'''


def config_map_name(context: GraphContext) -> str:
    """Return the name of a graph's ConfigMap with the script."""
    return f"{context.name}-{VOLUME}"


def config_map(context: GraphContext) -> KubeObject:
    """Return the ConfigMap with the script, one for each graph with a component of several nodes."""
    name = config_map_name(context)
    metadata = {"name": name, "namespace": context.namespace, "labels": {GRAPH: context.name}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: SCRIPT}}


def add_init_container(spec: KubeObject, main: KubeObject, context: GraphContext, group: NodeGroup, port: int) -> None:
    """Add the init container to a worker's pod.

    A shell resolves the address: providers append their variables after the container's own, where Kubernetes does not
    replace references to them.
    """
    script = f'export LEADER_HOST="{group.leader_in_shell}" LEADER_PORT={port} && exec python3 {DIRECTORY}/{KEY}'
    container: KubeObject = {"name": CONTAINER, "command": ["sh", "-c", script]}
    container |= {name: main[name] for name in ("image", "imagePullPolicy") if name in main}
    container["volumeMounts"] = [{"name": VOLUME, "mountPath": DIRECTORY, "readOnly": True}]
    spec.setdefault("initContainers", []).append(container)
    spec.setdefault("volumes", []).append({"name": VOLUME, "configMap": {"name": config_map_name(context)}})
