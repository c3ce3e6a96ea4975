"""Accounts of a graph's processes."""

from dynamo.operator.reconcile.accounts import discovery_access, planner_access
from dynamo.operator.reconcile.graph import ObservedGraph, graph_plan
from dynamo.operator.reconcile.names import GraphContext, OperatorSettings
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

NOW = "2026-01-01T00:00:00Z"


def graph(kind: str, observed: int | None) -> DynamoGraphDeployment:
    value: KubeObject = {
        "metadata": {"name": "g", "namespace": "ns", "generation": 2},
        "spec": {"components": [{"name": "a", "type": kind}]},
    }
    if observed is not None:
        value["status"] = {"observedGeneration": observed}
    return decode(DynamoGraphDeployment, value)


def unowned(value: DynamoGraphDeployment) -> list[str]:
    plan = graph_plan(value, ObservedGraph(), OperatorSettings(), NOW)
    return [f"{one['kind']}/{one['metadata']['name']}" for one in plan.create_unowned]


def test_account_role_and_binding_refer_to_each_other() -> None:
    context = GraphContext(name="g", namespace="ns", settings=OperatorSettings(), worker_hash="")
    account, role, binding = discovery_access(context)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "ns"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "g-k8s-service-discovery-role"


def test_discovery_in_etcd_needs_no_account() -> None:
    settings = OperatorSettings(discovery_backend="etcd", etcd_endpoints="http://etcd:2379")
    assert not list(discovery_access(GraphContext(name="g", namespace="ns", settings=settings, worker_hash="")))


def test_account_of_planners_is_made_once_for_each_version_of_a_graph_with_a_planner() -> None:
    made = ["ServiceAccount/planner-serviceaccount", "Role/planner-role", "RoleBinding/planner-binding"]
    assert unowned(graph("planner", None)) == unowned(graph("planner", 1)) == made
    assert unowned(graph("planner", 2)) == []
    assert unowned(graph("frontend", None)) == []
    assert len(planner_access("ns")) == 3
