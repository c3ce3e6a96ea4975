"""KV transfer policies: what workers get, and which pods are labelled."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import NO_GROVE, PureCluster
from tests.unit.operator.reconcile.test_graph import spec_of

from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.topology import FROM_NODE, LABEL_KEY, TOPOLOGY_NAME, missing_labels

KEY = "topology.kubernetes.io/rack"
POLICY = {"labelKey": KEY, "domain": "rack", "enforcement": "preferred", "preferredWeight": 0.75}


def templates(policy: dict[str, Any], facts: ClusterFacts = NO_GROVE) -> dict[str, dict[str, Any]]:
    """Return the pod templates of a graph with a policy, by component."""
    spec = spec_of(experimental={"kvTransferPolicy": policy}, env=[{"name": "DYN_TOPOLOGY_ENABLED", "value": "no"}])
    cluster = PureCluster({"spec": spec}, facts)
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


def test_transfer_policy_is_required_unless_preferred() -> None:
    found = variables(templates({"labelKey": KEY, "domain": "rack"})["prefill"])
    assert found["DYN_KV_TRANSFER_ENFORCEMENT"] == "required"
    assert "DYN_KV_TRANSFER_PREFERRED_WEIGHT" not in found


def test_non_worker_components_have_no_transfer_policy() -> None:
    template = templates(POLICY)["Frontend"]
    assert "DYN_KV_TRANSFER_DOMAIN" not in variables(template)
    assert FROM_NODE not in template["metadata"]["labels"]


TOPOLOGIES = {"gpus": {"zone": "topology.kubernetes.io/zone", "rack": KEY}}
OF_GROVE = {"clusterTopologyName": "gpus", "domain": "rack"}


def test_grove_topology_adds_a_file_for_each_domain() -> None:
    template = templates(OF_GROVE, replace(NO_GROVE, topologies=TOPOLOGIES))["decode"]
    [volume] = [one for one in template["spec"]["volumes"] if "downwardAPI" in one]
    found = {one["path"]: one["fieldRef"]["fieldPath"] for one in volume["downwardAPI"]["items"]}
    assert found == {
        "zone": "metadata.labels['nvidia.com/dynamo-topology.zone']",
        "rack": "metadata.labels['nvidia.com/dynamo-topology.rack']",
    }
    assert template["metadata"]["annotations"][TOPOLOGY_NAME] == "gpus"
    assert LABEL_KEY not in template["metadata"]["annotations"]


def test_unknown_topology_uses_the_domain_of_the_policy() -> None:
    template = templates(OF_GROVE)["decode"]
    [volume] = [one for one in template["spec"]["volumes"] if "downwardAPI" in one]
    assert [one["path"] for one in volume["downwardAPI"]["items"]] == ["rack"]


@pytest.mark.parametrize(
    ("topologies", "message"),
    [({}, "clusterTopologyName: the cluster has no topology 'gpus'"), ({"gpus": {"zone": "z"}}, "which has zone")],
)
def test_missing_topology_or_domain_fails_the_graph(topologies: Any, message: str) -> None:
    spec = spec_of(experimental={"kvTransferPolicy": OF_GROVE})
    cluster = PureCluster({"spec": spec}, replace(NO_GROVE, topologies=topologies))
    cluster.step_graph()
    assert cluster.graph["status"]["state"] == "failed"
    assert message in cluster.graph["status"]["conditions"][0]["message"]


ZONE, RACK = "nvidia.com/dynamo-topology.zone", "nvidia.com/dynamo-topology.rack"


@pytest.mark.parametrize(
    ("metadata", "node", "expected"),
    [
        ({"annotations": {LABEL_KEY: KEY}}, "n", {KEY: KEY}),
        ({"annotations": {LABEL_KEY: KEY}}, None, {}),
        ({"annotations": {LABEL_KEY: KEY}, "labels": {KEY: "r1"}}, "n", {}),
        ({}, "n", {}),
        ({"annotations": {LABEL_KEY: KEY}, "deletionTimestamp": "t"}, "n", {}),
        ({"annotations": {TOPOLOGY_NAME: "gpus"}, "labels": {ZONE: "z1"}}, "n", {RACK: KEY}),
        ({"annotations": {TOPOLOGY_NAME: "other"}}, "n", {}),
    ],
)
def test_scheduled_pod_requires_its_topology_labels(metadata: Any, node: str | None, expected: dict[str, str]) -> None:
    pod = {"metadata": metadata, "spec": {"nodeName": node}}
    assert missing_labels(pod, TOPOLOGIES) == expected
