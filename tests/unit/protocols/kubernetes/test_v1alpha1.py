"""Resources of v1alpha1 that v1beta1 replaces."""

from dynamo.protocols.kubernetes.common import decode, encode
from dynamo.protocols.kubernetes.crds import version_schema
from dynamo.protocols.kubernetes.schema import problems, with_defaults
from dynamo.protocols.kubernetes.v1alpha1 import DynamoGraphDeploymentRequestV1Alpha1, DynamoGraphDeploymentV1Alpha1

GRAPH = {
    "apiVersion": "nvidia.com/v1alpha1",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "agg"},
    "spec": {
        "backendFramework": "vllm",
        "envs": [{"name": "A", "value": "1"}],
        "pvcs": [{"name": "cache", "create": False}],
        "services": {
            "Frontend": {"componentType": "frontend", "replicas": 1, "dynamoNamespace": "ns"},
            "Worker": {
                "componentType": "worker",
                "replicas": 2,
                "resources": {"limits": {"gpu": "1"}},
                "extraPodSpec": {"mainContainer": {"image": "i", "args": ["x"]}, "tolerations": [{"key": "gpu"}]},
            },
        },
    },
}


def test_graph_with_services_is_read_and_written_unchanged() -> None:
    assert list(problems(GRAPH, version_schema("DynamoGraphDeployment", "v1alpha1"))) == []
    graph = decode(DynamoGraphDeploymentV1Alpha1, GRAPH)
    assert graph.spec.services is not None
    assert graph.spec.services["Worker"].replicas == 2
    assert encode(graph)["spec"] == GRAPH["spec"]


def test_request_with_targets_keeps_its_profiling_configuration() -> None:
    sla = {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}
    value = {"spec": {"model": "m", "autoApply": True, "profilingConfig": {"config": {"sla": sla}}}}
    schema = version_schema("DynamoGraphDeploymentRequest", "v1alpha1")
    assert list(problems(value, schema)) == []
    spec = decode(DynamoGraphDeploymentRequestV1Alpha1, with_defaults(value, schema)).spec
    assert spec.profiling_config is not None
    assert spec.profiling_config.config == {"sla": sla}
    assert (spec.auto_apply, spec.use_mocker, spec.enable_gpu_discovery) == (True, False, True)


def test_problem_of_a_service_names_its_path() -> None:
    value = {"spec": {"services": {"Worker": {"replicas": -1, "multinode": {"nodeCount": 1}}}}}
    found = [one.path for one in problems(value, version_schema("DynamoGraphDeployment", "v1alpha1"))]
    assert found == ["spec.services.Worker.replicas", "spec.services.Worker.multinode.nodeCount"]
