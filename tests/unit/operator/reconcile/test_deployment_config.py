"""DYN_DEPLOYMENT_CONFIG: replicas, resources and ports that a graph's components get from it."""

import json
from typing import Any

import pytest

from dynamo.operator.reconcile.deployment_config import VARIABLE, with_deployment_config
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.protocols.kubernetes.common import KubeObject, ObjectMeta
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment, GraphSpec

RESOURCES = {"cpu": "2", "memory": "4Gi", "gpu": "1", "custom": {"rdma/ib": "1"}}
CONFIG = {
    "Frontend": {"model": "m", "port": 1},
    "VllmWorker": {"ServiceArgs": {"workers": 3, "resources": RESOURCES}, "model": "m"},
}


def graph(*components: ComponentSpec, config: object = CONFIG) -> DynamoGraphDeployment:
    text = config if isinstance(config, str) else json.dumps(config)
    return DynamoGraphDeployment(
        metadata=ObjectMeta(name="g", namespace="prod"),
        spec=GraphSpec(components=list(components), env=[{"name": VARIABLE, "value": text}]),
    )


def only(found: DynamoGraphDeployment) -> tuple[ComponentSpec, KubeObject]:
    (component,) = found.spec.components or []
    assert component.pod_template is not None
    return component, component.pod_template["spec"]["containers"][0]


def worker(**fields: Any) -> ComponentSpec:
    main = {"name": "main", "resources": {"limits": {"cpu": "1", "other": "1"}}}
    return ComponentSpec(name="VllmWorker", type="worker", pod_template={"spec": {"containers": [main]}}, **fields)


def test_workers_and_resources_are_those_of_the_component() -> None:
    given = graph(worker())
    component, main = only(with_deployment_config(given))
    wanted = {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1", "rdma/ib": "1"}
    assert main["resources"] == {"limits": {"other": "1", **wanted}, "requests": wanted}
    assert component.replicas == 3
    assert only(given)[1]["resources"] == {"limits": {"cpu": "1", "other": "1"}}


def test_stated_replicas_take_precedence() -> None:
    assert only(with_deployment_config(graph(worker(replicas=1))))[0].replicas == 1


@pytest.mark.parametrize("name", ["Frontend", "front"])
def test_frontend_gets_its_port(name: str) -> None:
    _, main = only(with_deployment_config(graph(ComponentSpec(name=name, type="frontend"))))
    (variable,) = main["env"]
    assert json.loads(variable["value"]) == {**CONFIG, "Frontend": {"model": "m", "port": 8000}}


def test_own_variable_precedes_that_of_the_graph() -> None:
    one = worker()
    assert one.pod_template is not None
    own = {"VllmWorker": {"ServiceArgs": {"workers": 5}}}
    one.pod_template["spec"]["containers"][0]["env"] = [{"name": VARIABLE, "value": json.dumps(own)}]
    assert only(with_deployment_config(graph(one)))[0].replicas == 5


def test_graph_without_the_variable_is_unchanged() -> None:
    given = DynamoGraphDeployment(metadata=ObjectMeta(name="g"), spec=GraphSpec(components=[worker()]))
    assert with_deployment_config(given) is given


@pytest.mark.parametrize("config", ["{", '{"VllmWorker": {"ServiceArgs": {"workers": "x"}}}', "[]"])
def test_invalid_value_names_the_variable(config: str) -> None:
    with pytest.raises(WorkloadError, match=r"components\[VllmWorker\].*env\[DYN_DEPLOYMENT_CONFIG\]: "):
        with_deployment_config(graph(worker(), config=config))
