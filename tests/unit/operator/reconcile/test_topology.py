"""KV transfer policies: what workers get, and which pods are labelled."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import PureCluster
from tests.unit.operator.reconcile.test_graph import spec_of

from dynamo.operator.reconcile.topology import FROM_NODE, LABEL_KEY, wanted_label

KEY = "topology.kubernetes.io/rack"
POLICY = {"labelKey": KEY, "domain": "rack", "enforcement": "preferred", "preferredWeight": 0.75}


def templates(policy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of a graph with a policy, by component."""
    spec = spec_of(experimental={"kvTransferPolicy": policy}, env=[{"name": "DYN_TOPOLOGY_ENABLED", "value": "no"}])
    cluster = PureCluster({"spec": spec})
    cluster.settle()
    made = cluster.of_kind("Deployment")
    return {one["metadata"]["labels"]["nvidia.com/dynamo-component"]: one["spec"]["template"] for one in made}


def variables(template: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}


def test_workers_read_their_domain_from_a_file_of_the_pod() -> None:
    template = templates(POLICY)["decode"]
    found = variables(template)
    assert (found["DYN_KV_TRANSFER_DOMAIN"], found["DYN_KV_TRANSFER_ENFORCEMENT"]) == ("rack", "preferred")
    assert (found["DYN_KV_TRANSFER_PREFERRED_WEIGHT"], found["DYN_TOPOLOGY_ENABLED"]) == ("0.75", "true")
    folder = found["DYN_TOPOLOGY_MOUNT_PATH"]
    [mount] = [one for one in template["spec"]["containers"][0]["volumeMounts"] if one["mountPath"] == folder]
    [volume] = [one for one in template["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["downwardAPI"]["items"] == [{"path": "rack", "fieldRef": {"fieldPath": f"metadata.labels['{KEY}']"}}]
    assert template["metadata"]["annotations"][LABEL_KEY] == KEY
    assert template["metadata"]["labels"][FROM_NODE] == "true"


def test_a_policy_requires_its_domain_unless_it_prefers_it() -> None:
    found = variables(templates({"labelKey": KEY, "domain": "rack"})["prefill"])
    assert found["DYN_KV_TRANSFER_ENFORCEMENT"] == "required"
    assert "DYN_KV_TRANSFER_PREFERRED_WEIGHT" not in found


def test_other_components_have_no_policy() -> None:
    template = templates(POLICY)["Frontend"]
    assert "DYN_KV_TRANSFER_DOMAIN" not in variables(template)
    assert FROM_NODE not in template["metadata"]["labels"]


def test_a_policy_of_a_topology_of_grove_fails_the_graph() -> None:
    policy = {"clusterTopologyName": "gpus", "domain": "rack"}
    cluster = PureCluster({"spec": spec_of(experimental={"kvTransferPolicy": policy})})
    cluster.step_graph()
    assert cluster.graph["status"]["state"] == "failed"
    assert "clusterTopologyName: is not supported" in cluster.graph["status"]["conditions"][0]["message"]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"metadata": {"annotations": {LABEL_KEY: KEY}}, "spec": {"nodeName": "n"}}, KEY),
        ({"metadata": {"annotations": {LABEL_KEY: KEY}}, "spec": {}}, None),
        ({"metadata": {"annotations": {LABEL_KEY: KEY}, "labels": {KEY: "r1"}}, "spec": {"nodeName": "n"}}, None),
        ({"metadata": {}, "spec": {"nodeName": "n"}}, None),
        ({"metadata": {"annotations": {LABEL_KEY: KEY}, "deletionTimestamp": "t"}, "spec": {"nodeName": "n"}}, None),
    ],
)
def test_a_pod_lacks_a_label_once_it_is_scheduled(pod: dict[str, Any], expected: str | None) -> None:
    assert wanted_label(pod) == expected
