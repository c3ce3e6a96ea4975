"""Addresses of workers."""

from typing import Any

import pytest

from dynamo.epp.addresses import InstanceAddresses, address_of_pod, is_in, records_of
from dynamo.epp.peers import ready_addresses
from dynamo.epp.pool import PoolSpec, spec_of
from dynamo.protocols.discovery import Instance, TransportAddress


def pod(**changes: Any) -> dict[str, Any]:
    metrics = {"name": "main", "ports": [{"name": "system", "containerPort": 9090}]}
    sidecar = {"name": "sidecar-frontend", "ports": [{"name": "http", "containerPort": 8000}]}
    made: dict[str, Any] = {
        "metadata": {"name": "w-0"},
        "spec": {"containers": [metrics, sidecar]},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return {**made, **changes}


def test_address_is_the_port_named_http_of_a_ready_pod() -> None:
    assert address_of_pod(pod(), None) == "10.0.0.1:8000"
    assert address_of_pod(pod(), 9) == "10.0.0.1:9"
    status = {"podIP": "fd00::1", "conditions": [{"type": "Ready", "status": "True"}]}
    assert address_of_pod(pod(status=status), 9) == "[fd00::1]:9"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
        {"status": None},
        {"metadata": {"name": "w-0", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"spec": {"containers": [{"name": "main"}]}},
    ],
)
def test_pod_that_cannot_serve_has_no_address(changes: dict[str, Any]) -> None:
    assert address_of_pod(pod(**changes), None) is None


def test_container_discovery_records_are_listed_per_container() -> None:
    assert list(records_of(pod())) == ["w-0", "w-0-sidecar-frontend"]


def test_subset_matches_addresses_with_and_without_ports() -> None:
    assert is_in("10.0.0.1:8000", None)
    assert is_in("10.0.0.1:8000", {"10.0.0.1"})
    assert is_in("[fd00::1]:8000", {"fd00::1"})
    assert not is_in("10.0.0.1:8000", {"10.0.0.1:9"})
    assert not is_in("10.0.0.1:8000", frozenset())


def test_instances_outside_a_cluster_are_at_their_host() -> None:
    one = Instance("c", "e", "n", 7, TransportAddress(tcp="10.0.0.1:5000/7/n/c/e"))
    other = Instance("c", "e", "n", 8, TransportAddress(nats_tcp="subject"))
    addresses = InstanceAddresses(lambda: [one, other], 8000)
    assert addresses.all() == {7: "10.0.0.1:8000"}
    assert addresses.address_of(8) is None


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (
            {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 8000}]},
            PoolSpec("a=1,b=2", 8000),
        ),
        ({"selector": {"matchLabels": {}}, "targetPorts": [{"number": 8000}]}, None),
        ({"selector": {"matchLabels": {"a": "1"}}, "targetPorts": [{"number": 1}, {"number": 2}]}, None),
        ({}, None),
    ],
)
def test_pool_names_labels_and_one_port(spec: dict[str, Any], found: PoolSpec | None) -> None:
    assert spec_of({"spec": spec}) == found


def test_replicas_are_the_ready_endpoints_of_a_slice() -> None:
    endpoints = [
        {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
        {"addresses": ["10.0.0.3"]},
    ]
    assert ready_addresses({"endpoints": endpoints}) == {"10.0.0.1", "10.0.0.3"}
    assert ready_addresses({}) == set()
