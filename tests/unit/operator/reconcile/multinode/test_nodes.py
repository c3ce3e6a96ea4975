"""Addresses and ranks of the nodes of a group."""

import pytest
from tests.kubelet import programs

from dynamo.operator.reconcile.multinode.nodes import grove_nodes, leader_worker_set_nodes, node_count
from dynamo.protocols.kubernetes.common import Multinode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

LWS = {"LWS_LEADER_ADDRESS": "g-decode-0-3.g-decode-0.prod", "LWS_WORKER_INDEX": "2"}
GROVE = {
    "GROVE_PCSG_NAME": "g-0-decode",
    "GROVE_PCSG_INDEX": "1",
    "GROVE_HEADLESS_SERVICE": "g-0.prod.svc.cluster.local",
    "GROVE_PCLQ_POD_INDEX": "1",
}


def test_hosts_of_a_leader_worker_set(tmp_path) -> None:
    container = {"command": ["sh", "-c", f"show {' '.join(leader_worker_set_nodes(3).hosts)}"]}
    assert programs(container, tmp_path, variables=LWS, names=("show",)) == [
        ["show", "g-decode-0-3.g-decode-0.prod", "g-decode-0-3-1.g-decode-0.prod", "g-decode-0-3-2.g-decode-0.prod"]
    ]


def test_hosts_of_a_scaling_group(tmp_path) -> None:
    domain = "g-0.prod.svc.cluster.local"
    container = {"command": ["sh", "-c", f"show {' '.join(grove_nodes('Decode', 3).hosts)}"]}
    assert programs(container, tmp_path, variables=GROVE, names=("show",)) == [
        [
            "show",
            f"g-0-decode-1-decode-ldr-0.{domain}",
            f"g-0-decode-1-decode-wkr-0.{domain}",
            f"g-0-decode-1-decode-wkr-1.{domain}",
        ]
    ]


@pytest.mark.parametrize(("group", "variables"), [(leader_worker_set_nodes(3), LWS), (grove_nodes("d", 3), GROVE)])
def test_rank_expression_is_equal_in_shell_arithmetic(group, variables, tmp_path) -> None:
    rank = group.rank if isinstance(group.rank, str) else group.rank.text
    script = f"show {rank} $((8 * {group.rank_arithmetic})) {group.leader}"
    [found] = programs({"command": ["sh", "-c", script]}, tmp_path, variables=variables, names=("show",))
    address = programs(
        {"command": ["sh", "-c", f'show "{group.leader_in_shell}"']}, tmp_path, variables=variables, names=("show",)
    )
    assert found == ["show", "2", "16", address[0][1]]


def test_node_count_defaults_to_one_or_two_for_multinode() -> None:
    assert node_count(ComponentSpec(name="a")) == 1
    assert node_count(ComponentSpec(name="a", multinode=Multinode())) == 2
    assert node_count(ComponentSpec(name="a", multinode=Multinode(node_count=4))) == 4
