"""DynamoGraphDeploymentRequests against an API server: profiling jobs run as processes, and requests survive faults."""

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from tests.cluster.kubernetes.job_runner import JobRunner
from tests.cluster.kubernetes.operated import (
    DEADLINE_S,
    SPACE,
    Case,
    DyingClient,
    Object,
    OperatedCluster,
    run_on,
)
from tests.cluster.kubernetes.running import KubernetesServer

from dynamo.k8s.client import KubeClient
from dynamo.k8s.informer import Informer, ObjectKey
from dynamo.k8s.kinds import COMPONENTS as COMPONENT_OBJECTS
from dynamo.k8s.kinds import (
    CONFIG_MAPS,
    EVENTS,
    GRAPH_REQUESTS,
    GRAPHS,
    JOBS,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    ObjectKind,
)
from dynamo.operator import manager
from dynamo.operator.manager import Operator
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.requests import phases
from dynamo.operator.webhooks import WebhookServer, WebhookSettings
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1
from dynamo.protocols.kubernetes.crds import CONVERSION_NAMESPACE, CONVERSION_SERVICE

pytestmark = pytest.mark.integration

WRITES_OF_A_REQUEST = 7
"""Least number of writes until the graph exists: three of access, the job, a status, the ConfigMap and the graph."""
ADMIN = "admin"
"""User of the clients of the tests, the operator among them."""
LEFT_BEHIND = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIG_MAPS)
"""Kinds of the objects that outlive a request."""
NAMESPACES = ObjectKind("v1", "Namespace", "namespaces", is_namespaced=False)
ALPHA_REQUESTS = ObjectKind(V1ALPHA1, GRAPH_REQUESTS.kind, GRAPH_REQUESTS.plural)
HARDWARE = {"gpuSku": "h200_sxm", "vramMb": 143771, "numGpusPerNode": 8, "totalGpus": 8}
GPUS = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "143771"}
COMPONENTS: list[Object] = [
    {
        "name": name,
        "type": kind,
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": "i:1"}]}},
    }
    for name, kind in (("Frontend", "frontend"), ("decode", "decode"))
]
RESULT = yaml.safe_dump_all(
    [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "planner-config-1a2b"}, "data": {"a": "b"}},
        {
            "apiVersion": V1BETA1,
            "kind": GRAPHS.kind,
            "metadata": {"name": "chat-dgd"},
            "spec": {"components": COMPONENTS},
        },
    ]
)
PROFILER = f"""
import json, pathlib, sys, time
config, folder = json.loads(sys.argv[sys.argv.index("--config") + 1]), pathlib.Path(sys.argv[-1])
def report(status, **fields):
    text = "".join(f"{{name}}: {{json.dumps(value)}}\\n" for name, value in fields.items())
    temporary = folder / "status.tmp"
    temporary.write_text(f"status: {{status}}\\n" + text)
    temporary.rename(folder / "profiler_status.yaml")
report("running", phase="SweepingPrefill", message="1 of 2")
while not (folder / "continue").exists():
    time.sleep(0.05)
if (folder / "continue").read_text():
    report("failed", phase="SweepingDecode", error="no configuration meets the targets")
    sys.exit(1)
assert config["hardware"] == {HARDWARE!r}, config
(folder / "final_config.yaml").write_text({RESULT!r})
report("success", phase="Done", message="done")
"""
INTERVALS = (("POLL_S = 2.0", "POLL_S = 0.2"), ("CHECK_S = 6.0", "CHECK_S = 0.4"))
"""Intervals of the sidecar, and those of the tests."""


def request(kind: ObjectKind = GRAPH_REQUESTS, **spec: Any) -> Object:
    """Return a request with known hardware."""
    value = {"model": "m", "image": "planner:1", "hardware": HARDWARE, **spec}
    metadata = {"name": "chat", "namespace": SPACE}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": value}


def alpha_request() -> Object:
    """Return a request as users of the first versions wrote it."""
    config = {"sla": {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}}
    profiling = {"profilerImage": "planner:1", "config": config}
    metadata = {"name": "chat", "namespace": SPACE}
    spec = {"model": "Qwen/Qwen3-32B", "backend": "vllm", "profilingConfig": profiling, "autoApply": True}
    return {"apiVersion": V1ALPHA1, "kind": GRAPH_REQUESTS.kind, "metadata": metadata, "spec": spec}


class Requests:
    """A cluster in which one request is reconciled."""

    def __init__(self, cluster: OperatedCluster) -> None:
        self.cluster = cluster
        self.client = cluster.client

    async def status(self) -> Object:
        value = await self.client.get(GRAPH_REQUESTS, "chat", SPACE)
        return (value or {}).get("status") or {}

    async def until(self, is_reached: Callable[[Object], bool]) -> Object:
        """Wait until the status of the request has a property; return it."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_reached(status := await self.status()):
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)
        return status

    async def until_phase(self, phase: str) -> Object:
        return await self.until(lambda status: status.get("phase") == phase)

    async def until_exists(self, kind: ObjectKind, name: str, before: Object | None = None) -> Object:
        """Wait for an object, another one than `before`; return it. A deleted job exists until its pods are released."""
        deadline = time.monotonic() + DEADLINE_S
        former = None if before is None else before["metadata"]["uid"]
        while (value := await self.client.get(kind, name, SPACE)) is None or value["metadata"]["uid"] == former:
            assert time.monotonic() < deadline, f"no {kind.kind} {name}"
            await asyncio.sleep(0.05)
        return value

    async def until_gone(self, kind: ObjectKind) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while await self.cluster.names(kind):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def until_events(self, *reasons: str) -> None:
        """Wait until the request has events of these reasons, which are written after its status."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            events = (await self.client.list(EVENTS, SPACE)).items
            found = {one["reason"] for one in events if one["involvedObject"]["name"] == "chat"}
            if found >= set(reasons):
                return
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.05)

    async def publish(self, **data: str) -> None:
        """Write the output as the sidecar does."""
        value = await self.client.get(GRAPH_REQUESTS, "chat", SPACE)
        assert value is not None
        owner = {
            "apiVersion": V1BETA1, "kind": GRAPH_REQUESTS.kind, "name": "chat", "uid": value["metadata"]["uid"],
            "controller": True,
        }  # fmt: skip
        metadata = {"name": "dgdr-output-chat", "labels": {"dgdr.nvidia.com/name": "chat"}, "ownerReferences": [owner]}
        await self.client.apply(CONFIG_MAPS, {"metadata": metadata, "data": data}, SPACE, manager="output-copier")


def condition(status: Object, kind: str) -> tuple[str, str, str]:
    """Return status, reason and message of a condition."""
    return next((one["status"], one["reason"], one["message"]) for one in status["conditions"] if one["type"] == kind)


@asynccontextmanager
async def webhooks(server: KubernetesServer, client: KubeClient) -> AsyncIterator[None]:
    """Serve the admission and conversion webhooks."""
    await client.create(NAMESPACES, {"metadata": {"name": CONVERSION_NAMESPACE}})
    served = WebhookServer(client, WebhookSettings(operator_users=frozenset({ADMIN})))
    await served.start(socket.create_server(("127.0.0.1", 0)))
    addresses = server.server.webhooks.service_addresses
    addresses[f"{CONVERSION_NAMESPACE}/{CONVERSION_SERVICE}"] = f"https://127.0.0.1:{served.http.port}"
    try:
        yield
    finally:
        await served.close()


@pytest.fixture
def run(kubernetes_api: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    """Return a function that runs a case; jobs end at once, and the test writes their output."""
    monkeypatch.setattr(manager, "STOP_S", 0.01)
    return run_on(kubernetes_api, monkeypatch)


class ProcessCluster:
    """A cluster whose profiling pods are processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.script = folder / "profiler.py"
        self.script.write_text(PROFILER)
        self.is_scripted = True
        """Whether the script runs instead of the profiler."""

    def run(self, case: Callable[[Requests, JobRunner], Any]) -> None:
        """Run a case with the operator, the webhooks and the job runner."""

        async def started(cluster: OperatedCluster) -> None:
            node = {"metadata": {"name": "gpus", "labels": GPUS}}
            runner = JobRunner(
                cluster.server, cluster.client, self.folder / "pods", "app=dynamo-profiler", self.command
            )
            await cluster.client.create(NODES, node)
            async with webhooks(cluster.server, cluster.client), cluster.operator(), runner:
                await case(Requests(cluster), runner)

        with KubernetesServer(self.folder / "kubernetes", tls=True) as server:
            assert server.controllers is not None
            server.controllers.is_external = lambda pod: pod["metadata"]["labels"].get("app") == "dynamo-profiler"
            run_on(server, self.monkeypatch)(started)

    def command(self, words: Sequence[str]) -> Sequence[str]:
        """Replace the profiler by the script if it is scripted, and shorten the intervals of the sidecar."""
        if list(words[:3]) == ["python3", "-m", "dynamo.profiler"]:
            program = [str(self.script)] if self.is_scripted else ["-m", "dynamo.profiler"]
            return [sys.executable, *program, *words[3:]]
        assert list(words[:2]) == ["python3", "-c"]
        text = words[2]
        for before, after in INTERVALS:
            assert before in text
            text = text.replace(before, after)
        return [sys.executable, "-c", text]

    def proceed(self, failure: str = "") -> None:
        """Let the profiler end."""
        [folder] = (self.folder / "pods").glob("*/profiling-output")
        (folder / "continue").write_text(failure)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessCluster:
    monkeypatch.setattr(manager, "STOP_S", 0.01)
    return ProcessCluster(tmp_path, monkeypatch)


def test_a_request_of_the_first_version_is_profiled_and_deployed(processes: ProcessCluster) -> None:
    processes.is_scripted = False

    async def case(requests: Requests, runner: JobRunner) -> None:
        client = requests.client
        await client.create(ALPHA_REQUESTS, alpha_request(), SPACE)
        status = await requests.until_phase("Deployed")
        found = status["deploymentInfo"]
        assert found["availableReplicas"] == found["replicas"] > 1
        graph = await requests.until_exists(GRAPHS, "chat-dgd")
        assert "ownerReferences" not in graph["metadata"]
        assert graph["metadata"]["labels"]["dgdr.nvidia.com/name"] == "chat"
        workers = [one for one in graph["spec"]["components"] if one["type"] in ("worker", "prefill", "decode")]
        assert workers
        assert all("Qwen/Qwen3-32B" in one["podTemplate"]["spec"]["containers"][0]["args"] for one in workers)
        alpha = await client.get(ALPHA_REQUESTS, "chat", SPACE)
        assert alpha is not None and alpha["status"]["state"] == "Ready"
        await requests.until_events(
            "Initialized", "ProfilingJobCreated", "SpecGenerated", "DeploymentCreated", "DeploymentReady"
        )
        assert len(runner.commands) == 2
        await client.delete(GRAPH_REQUESTS, "chat", SPACE)
        for kind in (JOBS, CONFIG_MAPS):
            await requests.until_gone(kind)
        assert await requests.cluster.names(GRAPHS) == ["chat-dgd"]

    processes.run(case)


def test_the_progress_of_the_profiler_is_shown_and_its_config_maps_end_with_the_graph(
    processes: ProcessCluster,
) -> None:
    async def case(requests: Requests, runner: JobRunner) -> None:
        await requests.client.create(GRAPH_REQUESTS, request(), SPACE)
        status = await requests.until(lambda found: found.get("profilingPhase") == "SweepingPrefill")
        assert condition(status, "Profiling") == ("False", "SweepingPrefill", "1 of 2")
        processes.proceed()
        await requests.until_phase("Deployed")
        await requests.client.delete(GRAPH_REQUESTS, "chat", SPACE)
        await requests.until_gone(JOBS)
        assert await requests.cluster.names(CONFIG_MAPS) == ["planner-config-1a2b"]
        await requests.client.delete(GRAPHS, "chat-dgd", SPACE)
        await requests.until_gone(CONFIG_MAPS)

    processes.run(case)


def test_a_failed_profiler_is_reported_with_its_error(processes: ProcessCluster) -> None:
    async def case(requests: Requests, runner: JobRunner) -> None:
        await requests.client.create(GRAPH_REQUESTS, request(), SPACE)
        await requests.until(lambda found: found.get("profilingPhase") == "SweepingPrefill")
        processes.proceed("fail")
        status = await requests.until_phase("Failed")
        _, reason, message = condition(status, "Profiling")
        assert reason == "SweepingDecodeFailed"
        assert message == "profiling failed: no configuration meets the targets"

    processes.run(case)


class Profiler:
    """Publishes a result for each job of the request, while it is used as a context."""

    def __init__(self, requests: Requests, **data: str) -> None:
        self._requests = requests
        self._data = data or {"phase": "Done", "message": "done", "final_config.yaml": RESULT}
        self._informer = Informer(requests.client, JOBS, SPACE, on_change=self._on_job)
        self._tasks: set[asyncio.Task[None]] = set()

    def _on_job(self, key: ObjectKey, job: Object | None) -> None:
        if job is not None:
            self._tasks.add(asyncio.create_task(self._requests.publish(**self._data)))

    async def __aenter__(self) -> Self:
        self._tasks.add(asyncio.create_task(self._informer.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self._tasks:
            one.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_deployed_request_causes_no_writes_and_follows_its_graph(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        async with cluster.operator() as operator, Profiler(requests):
            await cluster.client.create(GRAPH_REQUESTS, request(), SPACE)
            await requests.until_phase("Deployed")
            await cluster.until_at_rest(operator)
            before = operator.applier.counts.total
            await asyncio.sleep(1.0)
            assert operator.applier.counts.total == before
            [pod] = [one for one in await cluster.names(PODS) if "decode" in one]
            await cluster.client.patch(PODS, pod, {"metadata": {"annotations": {"dynamo.test/ready": "false"}}}, SPACE)
            await cluster.client.delete(GRAPHS, "chat-dgd", SPACE)
            status = await requests.until_phase("Failed")
            assert condition(status, "DeploymentReady")[1] == "DeploymentDeleted"
            await asyncio.sleep(0.3)
            assert await cluster.names(GRAPHS) == []
            await requests.until_events("DeploymentDeleted")

    run(case)


def test_a_changed_specification_is_rejected_while_profiling(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        async with cluster.operator():
            await cluster.client.create(GRAPH_REQUESTS, request(), SPACE)
            await requests.until_phase("Profiling")
            change = {"spec": {"autoApply": False, "model": "other"}}
            await cluster.client.patch(GRAPH_REQUESTS, "chat", change, SPACE)
            await requests.until(lambda found: condition(found, "Validation")[1] == "SpecChangeRejected")
            await requests.publish(phase="Done", **{"final_config.yaml": RESULT})
            status = await requests.until_phase("Deployed")
            assert status["observedGeneration"] == 1
            await requests.until_events("SpecChangeRejected")

    run(case)


def test_deleted_job_is_created_again(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        async with cluster.operator():
            await cluster.client.create(GRAPH_REQUESTS, request(), SPACE)
            await requests.until_phase("Profiling")
            first = await requests.until_exists(JOBS, "profile-chat")
            await cluster.client.delete(JOBS, "profile-chat", SPACE)
            await requests.until_exists(JOBS, "profile-chat", before=first)
            await requests.publish(phase="Done", **{"final_config.yaml": RESULT})
            await requests.until_phase("Deployed")

    run(case)


@pytest.mark.parametrize("data", [{"phase": "Done"}, {"phase": "Done", "final_config.yaml": "a: ["}])
def test_missing_or_malformed_result_fails_the_request(
    data: dict[str, str], run: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "RESULT_GRACE_S", 1.0)
    monkeypatch.setattr(phases, "RESULT_RETRY_S", 0.2)

    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        async with cluster.operator(), Profiler(requests, **data):
            await cluster.client.create(GRAPH_REQUESTS, request(), SPACE)
            status = await requests.until_phase("Failed")
            assert "final_config.yaml" in condition(status, "SpecGenerated")[2]
            assert await cluster.names(GRAPHS) == []

    run(case)


def test_an_image_that_cannot_be_pulled_is_reported(
    own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod is left to the test, which only this server's stand-in for the kubelet allows."""

    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        assert own_kubernetes.controllers is not None
        own_kubernetes.controllers.is_external = lambda pod: True
        async with cluster.operator():
            await cluster.client.create(GRAPH_REQUESTS, request(), SPACE)
            await requests.until_phase("Profiling")
            deadline = time.monotonic() + DEADLINE_S
            while not (pods := await cluster.names(PODS)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            waiting = {"name": "profiler", "image": "planner:1", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
            waiting |= {"imageID": "", "ready": False, "restartCount": 0}
            status = {"status": {"containerStatuses": [waiting]}}
            await cluster.client.patch(PODS, pods[0], status, SPACE, subresource="status")
            found = await requests.until(lambda one: condition(one, "Profiling")[1] == "ImagePullFailed")
            assert found["phase"] == "Profiling"
            await requests.until_events("ImagePullFailed")

    run_on(own_kubernetes, monkeypatch)(case)


async def survives(requests: Requests, at: int) -> bool:
    """Create the request under an operator that dies at its write number `at`; return whether the graph existed before."""
    client = DyingClient(at)
    operator = Operator(client, OperatorSettings())
    operator.start()
    try:
        await requests.client.create(GRAPH_REQUESTS, request(), SPACE)
        deadline = time.monotonic() + DEADLINE_S
        while not client.has_died.is_set():
            assert time.monotonic() < deadline
            if (await requests.status()).get("phase") in ("Deploying", "Deployed"):
                return True
            await asyncio.sleep(0.02)
        return False
    finally:
        await operator.close()
        await client.close()


def test_request_is_deployed_after_an_operator_crash_at_any_write(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        requests = Requests(cluster)
        async with Profiler(requests):
            for at in itertools.count(1):
                has_ended = await survives(requests, at)
                async with cluster.operator():
                    status = await requests.until_phase("Deployed")
                    assert status["dgdName"] == "chat-dgd"
                    assert await cluster.names(GRAPHS) == ["chat-dgd"]
                    await cluster.client.delete(GRAPH_REQUESTS, "chat", SPACE)
                    await cluster.client.delete(GRAPHS, "chat-dgd", SPACE)
                    for kind in (JOBS, GRAPHS, GRAPH_REQUESTS, COMPONENT_OBJECTS):
                        await requests.until_gone(kind)
                for kind in LEFT_BEHIND:
                    for name in await cluster.names(kind):
                        await cluster.client.delete(kind, name, SPACE)
                if has_ended:
                    assert at > WRITES_OF_A_REQUEST
                    return

    run(case)
