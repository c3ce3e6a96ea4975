"""Cost of a thousand worker pods for a process that watches them through Kubernetes discovery.

    python -m benchmarks.kubernetes_discovery [--workers 1000] [--changes 20] [--idle-s 10]

The pods are objects of the API server of tests, which runs in a process of its own: a DynamoWorkerMetadata with an
endpoint and a model card each, and EndpointSlices of a hundred addresses, as Kubernetes writes them. Printed are the
time until a new process has the complete view, the time from a change until it is seen, and the idle processor time.
The server is written in Python and slower than a real one.
"""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import print_line, write_result
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.protocols.discovery import INSTANCES
from dynamo.protocols.kubernetes.crds import manifests
from dynamo.runtime.discovery.base import Delete, Put, Synced
from dynamo.runtime.discovery.kubernetes import MANAGER, KubernetesDiscovery
from dynamo.runtime.discovery.pod_identity import PodIdentity, id_of_name

NAMESPACE = "default"
SLICE_ADDRESSES = 100
AT_ONCE = 16
TIMEOUT_S = 120.0
LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}
RECORDS = f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}/dynamoworkermetadatas"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesBench:
    """Kubernetes discovery with many pods."""

    workers: int = option(1000, "--workers", None, "How many worker pods exist")
    changes: int = option(20, "--changes", None, "How many changes are timed")
    idle_s: float = option(10.0, "--idle-s", None, "How long to measure the cost while nothing happens")


@contextmanager
def api_server(folder: Path) -> Iterator[httpx.AsyncClient]:
    """Run the API server of tests, and yield a client of an administrator."""
    command = [sys.executable, "-m", "tests.cluster.kubernetes", "--no-controllers", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            os.environ["KUBECONFIG"] = found["kubeconfig"]
            transport = httpx.AsyncHTTPTransport(retries=5)  # The server prints its address before it accepts.
            headers = {"Authorization": f"Bearer {found['token']}"}
            yield httpx.AsyncClient(base_url=found["url"], headers=headers, timeout=TIMEOUT_S, transport=transport)
        finally:
            process.terminate()


def pod_name(number: int) -> str:
    return f"worker-{number}"


def metadata(number: int, version: int = 0) -> dict[str, Any]:
    """The object of a pod; `version` distinguishes two states of it."""
    name = pod_name(number)
    key = f"dynamo/backend/generate/{id_of_name(name):x}"
    shared = {
        "namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": id_of_name(name),
    }  # fmt: skip
    card = {"display_name": "m", "slug": "m", "context_length": 8192, "kv_cache_block_size": 16, "text": "x" * 1500}
    endpoint = {**shared, "type": "Endpoint", "transport": {"tcp": f"10.0.0.1:{40000 + version}/{key}"}}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": f"uid-{number}"}
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": {
            "data": {
                "endpoints": {key: endpoint},
                "model_cards": {key: {**shared, "type": "Model", "card_json": card}},
                "event_channels": {},
                "event_sources": {},
            }
        },
    }


def endpoint_slice(number: int, workers: range, absent: int = -1) -> dict[str, Any]:
    """One slice; the pod `absent` is not ready."""
    endpoints = [
        {
            "addresses": [f"10.{worker >> 16}.{worker >> 8 & 255}.{worker & 255}"],
            "conditions": {"ready": worker != absent},
            "targetRef": {"kind": "Pod", "name": pod_name(worker), "uid": f"uid-{worker}"},
        }
        for worker in workers
    ]
    return {
        "metadata": {"name": f"slice-{number}", "labels": LABELS},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [],
    }


async def create_pods(client: httpx.AsyncClient, workers: int) -> None:
    """Create the objects of all pods."""
    for _, crd in manifests(has_conversion=False):
        await client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=crd)
    for start in range(0, workers, AT_ONCE):
        found = await asyncio.gather(
            *(client.post(RECORDS, json=metadata(number)) for number in range(start, min(workers, start + AT_ONCE)))
        )
        for response in found:
            response.raise_for_status()
    for number, start in enumerate(range(0, workers, SLICE_ADDRESSES)):
        some = range(start, min(workers, start + SLICE_ADDRESSES))
        (await client.post(SLICES, json=endpoint_slice(number, some))).raise_for_status()


async def measure(config: KubernetesBench) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder, api_server(Path(folder)) as client:
        async with client:
            await create_pods(client, config.workers)
            identity = PodIdentity(pod="frontend", uid="uid-f", namespace=NAMESPACE, record="frontend")
            began = time.monotonic()
            discovery = KubernetesDiscovery(identity)
            watch = discovery.watch(INSTANCES)
            seen = 0
            async with asyncio.timeout(TIMEOUT_S):
                while not isinstance(await anext(watch), Synced):
                    seen += 1
            view_s = time.monotonic() - began
            assert seen == config.workers, f"{seen} of {config.workers} pods were seen"

            changed_s: list[float] = []
            unready_s: list[float] = []
            for number in range(config.changes):
                began = time.monotonic()
                body = json.dumps(metadata(number, 1 + number))
                headers = {"Content-Type": "application/apply-patch+yaml"}
                parameters = {"fieldManager": MANAGER, "force": "true"}
                path = f"{RECORDS}/{pod_name(number)}"
                (await client.patch(path, content=body, params=parameters, headers=headers)).raise_for_status()
                async with asyncio.timeout(TIMEOUT_S):
                    assert isinstance(await anext(watch), Put)
                changed_s.append(time.monotonic() - began)
                first = range(min(config.workers, SLICE_ADDRESSES))
                for absent, expected in ((number, Delete), (-1, Put)):
                    began = time.monotonic()
                    patch = json.dumps({"endpoints": endpoint_slice(0, first, absent)["endpoints"]})
                    headers = {"Content-Type": "application/merge-patch+json"}
                    (await client.patch(f"{SLICES}/slice-0", content=patch, headers=headers)).raise_for_status()
                    async with asyncio.timeout(TIMEOUT_S):
                        assert isinstance(await anext(watch), expected)
                    unready_s.append(time.monotonic() - began)

            began, busy = time.monotonic(), time.process_time()
            await asyncio.sleep(config.idle_s)
            idle = (time.process_time() - busy) / (time.monotonic() - began)
            await discovery.close()
    return {
        "workers": config.workers,
        "view_s": view_s,
        "changed_record_seen_s": {"median": statistics.median(changed_s), "max": max(changed_s)},
        "changed_readiness_seen_s": {"median": statistics.median(unready_s), "max": max(unready_s)},
        "idle_share_of_a_core": idle,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    """Run the benchmark."""
    config = load(KubernetesBench, sys.argv[1:], prog="python -m benchmarks.kubernetes_discovery")
    found = asyncio.run(measure(config))
    print_line(f"{found['workers']} pods: the whole view after {found['view_s']:.2f} s")
    for what in ("changed_record_seen_s", "changed_readiness_seen_s"):
        figures = found[what]
        print_line(f"{what}: median {figures['median'] * 1e3:.1f} ms, at most {figures['max'] * 1e3:.1f} ms")
    print_line(f"idle: {found['idle_share_of_a_core'] * 100:.3f} % of a core; memory {found['memory_mb']:.0f} MB")
    print_line(f"written to {write_result('kubernetes_discovery', found, is_whole=config == KubernetesBench())}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
