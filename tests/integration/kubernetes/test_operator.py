"""The operator against an API server: graphs become ready, heal, roll, restart, and cost nothing at rest."""

import asyncio
import base64
import copy
import time
from collections.abc import Callable

import pytest
from tests.cluster.kubernetes.operated import (
    COLLECTED_S,
    DEADLINE_S,
    SPACE,
    Case,
    Object,
    OperatedCluster,
    component,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes
from tests.cluster.kubernetes.workloads import workload_definitions
from tests.settle import until

from dynamo.core.codec import json_encode
from dynamo.k8s.kinds import (
    CLAIM_TEMPLATES,
    COMPONENTS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    GRAPHS,
    INFERENCE_POOLS,
    INGRESSES,
    LEADER_WORKER_SETS,
    NODES,
    PODS,
    SCALING_ADAPTERS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    VIRTUAL_SERVICES,
    VOLUME_CLAIMS,
)
from dynamo.operator.manager import Operator
from dynamo.operator.namespace_scope import OtherNamespaces, OwnedNamespace
from dynamo.operator.reconcile.names import RESTART_AT, OperatorSettings

pytestmark = pytest.mark.integration


@pytest.fixture
def run(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    return run_on(kubernetes_api, monkeypatch)


def test_graph_becomes_ready_and_no_writes_follow(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            status = await cluster.until(is_successful(1))
            assert status["components"]["decode"]["readyReplicas"] == 2
            assert len(await cluster.names(DEPLOYMENTS)) == len(await cluster.names(SERVICES)) == 2
            await cluster.until_at_rest(operator)
            before = operator.applier.counts.total
            await asyncio.sleep(2.0)
            assert operator.applier.counts.total == before
            events = await cluster.client.list(EVENTS, SPACE)
            assert "Ready" in {one["reason"] for one in events.items}

    run(case)


def test_a_second_operator_writes_nothing_that_changes_an_object(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            await cluster.until_at_rest(operator)
        kinds = (GRAPHS, COMPONENTS, DEPLOYMENTS, SERVICES)
        before = [await cluster.client.list(kind, SPACE) for kind in kinds]
        async with cluster.operator() as operator:
            await cluster.until_at_rest(operator)
        after = [await cluster.client.list(kind, SPACE) for kind in kinds]
        assert [one.items for one in after] == [one.items for one in before]

    run(case)


def test_edited_and_deleted_children_are_restored(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            services, deployments = await cluster.names(SERVICES), await cluster.names(DEPLOYMENTS)
            await cluster.client.delete(SERVICES, services[0], SPACE)
            await cluster.client.delete(DEPLOYMENTS, deployments[0], SPACE)
            await cluster.client.patch(DEPLOYMENTS, deployments[1], {"spec": {"replicas": 5}}, SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while True:
                restored = await cluster.client.get(DEPLOYMENTS, deployments[1], SPACE)
                found = [await cluster.names(kind) for kind in (SERVICES, DEPLOYMENTS)]
                if found == [services, deployments] and restored and restored["spec"]["replicas"] == 1:
                    break
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.05)
            await cluster.until(is_successful(1))

    run(case)


def test_a_new_image_rolls_the_workers_and_a_restart_reaches_every_pod(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            before = await cluster.names(DEPLOYMENTS)
            await cluster.apply(graph(image="image:2"))
            status = await cluster.until(is_successful(2))
            assert status["rollingUpdate"]["phase"] == "Completed"
            deadline = time.monotonic() + COLLECTED_S
            while len(after := await cluster.names(DEPLOYMENTS)) > 2:  # Garbage-collected with its component.
                assert time.monotonic() < deadline, after
                await asyncio.sleep(0.05)
            assert len(set(before) & set(after)) == 1
            await cluster.apply(graph(image="image:2", restart={"id": "r1"}))
            await cluster.until(lambda found: (found.get("restart") or {}).get("phase") == "Completed")
            for name in after:
                value = await cluster.client.get(DEPLOYMENTS, name, SPACE)
                assert value is not None
                assert value["spec"]["template"]["metadata"]["annotations"][RESTART_AT] == "r1"

    run(case)


def test_object_of_another_owner_is_not_adopted(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        foreign = {
            "metadata": {"name": "chat-frontend", "namespace": SPACE},
            "spec": {"selector": {"app": "other"}, "ports": [{"port": 1}]},
        }
        await cluster.client.create(SERVICES, {"apiVersion": "v1", "kind": "Service", **foreign}, SPACE)
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(lambda status: status.get("state") == "pending")
            await asyncio.sleep(0.5)
            found = await cluster.client.get(SERVICES, "chat-frontend", SPACE)
            assert found is not None and found["spec"]["selector"] == {"app": "other"}
            await cluster.client.delete(SERVICES, "chat-frontend", SPACE)
            await cluster.until(is_successful(1))

    run(case)


def test_deleted_graph_leaves_no_objects(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while await cluster.names(DEPLOYMENTS) or await cluster.names(SERVICES) or len(operator.applier):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


def test_a_scaled_adapter_scales_the_component(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = graph()
        value["spec"]["components"][1]["scalingAdapter"] = {}
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            body = {"spec": {"replicas": 4}}
            await cluster.client.patch(SCALING_ADAPTERS, "chat-decode", body, SPACE, subresource="scale")
            status = await cluster.until(is_successful(2))
            assert status["components"]["decode"]["readyReplicas"] == 4
            assert "rollingUpdate" not in status
            deadline = time.monotonic() + DEADLINE_S
            while True:
                adapter = await cluster.client.get(SCALING_ADAPTERS, "chat-decode", SPACE)
                assert adapter is not None and time.monotonic() < deadline
                if (adapter.get("status") or {}).get("replicas") == 4:
                    break
                await asyncio.sleep(0.05)
            assert "nvidia.com/dynamo-component=decode" in adapter["status"]["selector"]

    run(case)


def several_nodes(image: str = "image:1") -> Object:
    value = graph(image=image)
    main = value["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    main["command"] = ["python3", "-m", "dynamo.vllm", "--model", "m", "--tensor-parallel-size", "8"]
    main["resources"] = {"limits": {"nvidia.com/gpu": "4"}}
    value["spec"]["components"][1]["multinode"] = {"nodeCount": 2}
    value["metadata"]["annotations"] = {"nvidia.com/enable-grove": "false"}
    return value


def test_a_component_of_several_nodes_runs_as_a_leader_worker_set_and_rolls_without_a_surge(
    own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.apply(several_nodes())
            status = await cluster.until(is_successful(1))
            component = status["components"]["decode"]
            assert (component["componentKind"], component["readyReplicas"]) == ("LeaderWorkerSet", 2)
            assert component["gpusPerReplica"] == 8
            assert await cluster.names(CONFIG_MAPS) == ["chat-wait-leader-script"]
            pods = [one for one in await cluster.names(PODS) if "-decode-" in one]
            assert len(pods) == 4
            before = await cluster.names(LEADER_WORKER_SETS)
            await cluster.apply(several_nodes("image:2"))
            status = await cluster.until(is_successful(2))
            assert status["rollingUpdate"]["phase"] == "Completed"
            after = await cluster.names(LEADER_WORKER_SETS)
            assert len(after) == 1 and after != before

    run_on(own_kubernetes, monkeypatch, workload_definitions())(case)


def test_several_nodes_without_a_leader_worker_set_are_a_condition(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            await cluster.apply(several_nodes())
            status = await cluster.until(lambda found: found.get("state") == "failed")
            assert "require Grove or LeaderWorkerSet" in status["conditions"][0]["message"]

    run(case)


def test_claims_and_ingresses_of_a_v1alpha1_graph_are_made_and_collected(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        claim = {"name": "cache", "create": True, "size": "1Gi", "storageClass": "fast"}
        services = {"Frontend": {"ingress": {"enabled": True, "host": "chat.example.com", "hostSuffix": ""}}}
        value = graph()
        text = json_encode({"pvcs": [claim], "services": services}).decode()
        value["metadata"]["annotations"] = {"nvidia.com/dgd-spec": text}
        async with cluster.operator() as operator:
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            await cluster.until_at_rest(operator)
            assert await cluster.names(VOLUME_CLAIMS) == ["cache"]
            assert await cluster.names(INGRESSES) == ["chat-frontend"]
            before = operator.applier.counts.total
            await asyncio.sleep(1.0)
            assert operator.applier.counts.total == before
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while await cluster.names(VOLUME_CLAIMS) or await cluster.names(INGRESSES):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


def test_namespace_with_its_own_operator_is_not_reconciled_until_that_ends(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        client, settings = cluster.client, OperatorSettings()
        own = Operator(client, settings, namespace=SPACE, scope=OwnedNamespace(client, SPACE, "own"))
        whole = Operator(client, settings, scope=OtherNamespaces(client))
        own.start()
        await until(lambda: own.is_ready and not own._scope.excludes(SPACE))
        whole.start()
        try:
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            await until(lambda: whole.is_idle)
            assert whole.applier.counts.total == 0
            await own.close()
            await cluster.apply(graph(workers=3))
            await cluster.until(is_successful(2))
            assert whole.applier.counts.total > 0
        finally:
            await whole.close()

    run(case)


def extension(group: str, version: str, plural: str, kind: str) -> Object:
    """Return the definition of a kind of another controller, without its schema."""
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": free, "status": free}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "kind": kind},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


EXTENSIONS = [
    extension("networking.istio.io", "v1beta1", "virtualservices", "VirtualService"),
    extension("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool"),
]


def test_shared_objects_are_deleted_with_the_last_graph(run: Callable[[Case], None]) -> None:
    def sharing(name: str) -> Object:
        value = graph(name)
        value["spec"]["components"][1]["modelRef"] = {"name": "Qwen/Qwen3-0.6B"}
        value["spec"]["components"].append(component("Planner", "planner", 1, "planner:1"))
        return value

    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            for name in ("chat", "other"):
                await cluster.apply(sharing(name))
            for name in ("chat", "other"):
                await cluster.until(is_successful(1), name)
            [service] = [one for one in await cluster.names(SERVICES) if one.startswith("dynamo-model-")]
            await cluster.until_at_rest(operator)
            before = operator.applier.counts.total
            await asyncio.sleep(1.0)
            assert operator.applier.counts.total == before
            await cluster.client.delete(SERVICES, service, SPACE)
            await gone_and_back(cluster, service, is_present=True)
            await cluster.client.delete(GRAPHS, "chat", SPACE)
            deadline = time.monotonic() + COLLECTED_S
            while any(one.startswith("chat-") for one in await cluster.names(SERVICES)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert service in await cluster.names(SERVICES)
            assert "planner-serviceaccount" in await cluster.names(SERVICE_ACCOUNTS)
            await cluster.client.delete(GRAPHS, "other", SPACE)
            await gone_and_back(cluster, service, is_present=False)
            deadline = time.monotonic() + DEADLINE_S
            while "planner-serviceaccount" in await cluster.names(SERVICE_ACCOUNTS):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


async def gone_and_back(cluster: OperatedCluster, name: str, *, is_present: bool) -> None:
    """Wait until a service exists, or does not."""
    deadline = time.monotonic() + DEADLINE_S
    while (name in await cluster.names(SERVICES)) is not is_present:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_account_of_another_owner_is_not_changed(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "planner-serviceaccount"}}
        await cluster.client.create(SERVICE_ACCOUNTS, account, SPACE)
        value = graph()
        value["spec"]["components"].append(component("Planner", "planner", 1, "planner:1"))
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            found = await cluster.client.get(SERVICE_ACCOUNTS, "planner-serviceaccount", SPACE)
            assert found is not None and "ownerReferences" not in found["metadata"]

    run(case)


def test_pull_secrets_virtual_services_pools_and_topology_labels(
    kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(cluster: OperatedCluster) -> None:
        auths = base64.b64encode(json_encode({"auths": {"nvcr.io": {}}})).decode()
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "ngc"},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": auths},
        }
        await cluster.client.create(SECRETS, secret, SPACE)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0", "labels": {"rack": "r7"}}}
        await cluster.client.apply(NODES, node, manager="administrator")
        value = graph(image="nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1")
        value["spec"]["experimental"] = {"kvTransferPolicy": {"labelKey": "rack", "domain": "rack"}}
        entry = {"enabled": True, "host": "chat", "useVirtualService": True, "virtualServiceGateway": "istio/main"}
        text = json_encode({"services": {"Frontend": {"ingress": entry}}}).decode()
        value["metadata"]["annotations"] = {"nvidia.com/dgd-spec": text}
        picker = component("Epp", "epp", 1, "epp:1.6.1")
        value["spec"]["components"].append(picker)
        async with cluster.operator():
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            assert await cluster.names(VIRTUAL_SERVICES) == ["chat-frontend"]
            assert await cluster.names(INFERENCE_POOLS) == ["chat-pool"]
            pods = {one["metadata"]["name"]: one for one in (await cluster.client.list(PODS, SPACE)).items}
            secrets = {name.split("-")[1]: one["spec"].get("imagePullSecrets") for name, one in pods.items()}
            assert secrets == {"frontend": None, "decode": [{"name": "ngc"}], "epp": None}
            deadline = time.monotonic() + DEADLINE_S
            while True:
                workers = [one for one in (await cluster.client.list(PODS, SPACE)).items if "-decode-" in str(one)]
                if all(one["metadata"]["labels"].get("rack") == "r7" for one in workers):
                    break
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run_on(kubernetes_api, monkeypatch, EXTENSIONS)(case)


def test_gpu_memory_service_shares_the_gpus_of_a_pod(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = graph()
        worker = value["spec"]["components"][1]
        worker["podTemplate"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
        plain = copy.deepcopy(value)
        worker["experimental"] = {"gpuMemoryService": {}}
        async with cluster.operator() as operator:
            await cluster.apply(value)
            await cluster.until(is_successful(1))
            assert await cluster.names(CLAIM_TEMPLATES) == ["chat-decode-gpu"]
            made = await cluster.client.get(CLAIM_TEMPLATES, "chat-decode-gpu", SPACE)
            assert made is not None
            (request,) = made["spec"]["spec"]["devices"]["requests"]
            assert (request["exactly"]["deviceClassName"], request["exactly"]["count"]) == ("gpu.nvidia.com", 2)
            pods = [one for one in (await cluster.client.list(PODS, SPACE)).items if "-decode-" in str(one["metadata"])]
            assert [one["name"] for one in pods[0]["spec"]["initContainers"]] == ["gms-server"]
            assert pods[0]["spec"]["containers"][0]["resources"] == {"claims": [{"name": "intrapod-shared-gpu"}]}
            await cluster.until_at_rest(operator)
            await cluster.client.replace(GRAPHS, {**plain, "metadata": await metadata_of(cluster)}, SPACE)
            deadline = time.monotonic() + DEADLINE_S
            while await cluster.names(CLAIM_TEMPLATES):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(case)


async def metadata_of(cluster: OperatedCluster) -> Object:
    value = await cluster.client.get(GRAPHS, "chat", SPACE)
    assert value is not None
    found: Object = value["metadata"]
    return found


def test_graph_says_why_the_api_server_refuses_a_workload(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        value = graph()
        del value["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["image"]
        async with cluster.operator():
            await cluster.apply(value)

            def is_reported(status: Object) -> bool:
                return any("containers[0].image" in one["message"] for one in status.get("conditions") or ())

            status = await cluster.until(is_reported)
            assert status["state"] == "pending"

    run(case)
