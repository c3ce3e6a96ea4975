"""Groups of nodes that run one replica: how a pod finds the leader, its own rank and the other nodes."""

import re
from dataclasses import dataclass

from dynamo.operator.reconcile.multinode.commands import OptionWord, ShellExpression
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

LEADER_SUFFIX, WORKER_SUFFIX, MEMORY_SUFFIX = "ldr", "wkr", "gms"
DEFAULT_NODES = 2


class WorkloadError(ValueError):
    """A component that cannot run in the cluster; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Addresses and ranks in one group, as expressions that a pod of the group resolves."""

    size: int
    leader: str
    """Address of the leader, with references that Kubernetes replaces."""
    rank: OptionWord
    """Rank of a worker; the leader's is 0."""
    rank_arithmetic: str
    """The same within an arithmetic expression of a shell."""
    hosts: tuple[str, ...]
    """Addresses of all nodes within a shell script, the leader's first."""
    waits_for_names: bool
    """Whether pods start before the names of all nodes resolve."""

    @property
    def leader_in_shell(self) -> str:
        """Address of the leader within double quotes of a shell script."""
        return re.sub(r"\$\((\w+)\)", r"${\1}", self.leader)


def leader_worker_set_nodes(size: int) -> NodeGroup:
    """Return the group of a LeaderWorkerSet.

    The leader's address is LEADER_POD.SERVICE.NAMESPACE, and a worker's pod has the leader's name with its index.
    """
    pod, domain = "${LWS_LEADER_ADDRESS%%.*}", "${LWS_LEADER_ADDRESS#*.}"
    return NodeGroup(
        size=size,
        leader="$(LWS_LEADER_ADDRESS)",
        rank="$(LWS_WORKER_INDEX)",
        rank_arithmetic="LWS_WORKER_INDEX",
        hosts=("$LWS_LEADER_ADDRESS", *(f"{pod}-{index}.{domain}" for index in range(1, size))),
        waits_for_names=True,
    )


def grove_nodes(component: str, size: int) -> NodeGroup:
    """Return the group of a PodCliqueScalingGroup with a clique for the leader and one for the workers."""

    def address(suffix: str, index: int) -> str:
        pod = f"$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)-{component.lower()}-{suffix}-{index}"
        return f"{pod}.$(GROVE_HEADLESS_SERVICE)"

    leader = address(LEADER_SUFFIX, 0)
    return NodeGroup(
        size=size,
        leader=leader,
        rank=ShellExpression("$((GROVE_PCLQ_POD_INDEX + 1))"),
        rank_arithmetic="(GROVE_PCLQ_POD_INDEX + 1)",
        hosts=(leader, *(address(WORKER_SUFFIX, index) for index in range(size - 1))),
        waits_for_names=False,
    )


def grove_shadow_nodes(component: str, size: int, rank: int) -> NodeGroup:
    """Return the group of engines with the same index in the cliques of a replica's nodes, as a pod of rank `rank` sees it."""

    def address(clique: str) -> str:
        pod = f"$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)-{component.lower()}-{clique}-$(GROVE_PCLQ_POD_INDEX)"
        return f"{pod}.$(GROVE_HEADLESS_SERVICE)"

    leader = address(LEADER_SUFFIX)
    return NodeGroup(
        size=size,
        leader=leader,
        rank=str(rank),
        rank_arithmetic=str(rank),
        hosts=(leader, *(address(f"{WORKER_SUFFIX}-{index}") for index in range(1, size))),
        waits_for_names=False,
    )


def has_scaling_group(component: ComponentSpec) -> bool:
    """Return whether Grove runs a component as a PodCliqueScalingGroup: with several cliques, or where it is forced."""
    grove = component.experimental.grove if component.experimental else None
    return node_count(component) > 1 or has_memory_pods(component) or bool(grove and grove.force_scaling_group)


def has_memory_pods(component: ComponentSpec) -> bool:
    """Return whether pods of their own hold the GPU memory of a component."""
    service = component.experimental.gpu_memory_service if component.experimental else None
    return service is not None and service.mode == "InterPod"


def node_count(component: ComponentSpec) -> int:
    """Return the nodes of one replica."""
    if component.multinode is None:
        return 1
    return component.multinode.node_count or DEFAULT_NODES
