"""Names of a graph's objects with Grove: they share the characters that the name of a pod has."""

from collections.abc import Iterable

from dynamo.operator.reconcile.multinode.nodes import LEADER_SUFFIX, MEMORY_SUFFIX

NAME_BUDGET = 45
"""Characters that the names of set, scaling group and clique share in the names of pods."""
LEAST_NAME = 8


def clique_set_name(graph: str, lengths: Iterable[int]) -> str:
    """Return the name of a graph's PodCliqueSet: the graph's, shortened with a hash where the names of pods require it.

    `lengths` are those of `name_length` for each component.
    """
    length = max(NAME_BUDGET - max(lengths, default=0), LEAST_NAME)
    if len(graph) <= length:
        return graph
    return f"{graph[: length - 5]}-{_fnv32a(graph.encode()) & 0xFFFF:04x}"


def name_length(component: str, *, is_multinode: bool, has_group: bool, memory_nodes: int = 0) -> int:
    """Return how many characters a component takes.

    It is a clique NAME, or a scaling group NAME with one such clique, or with several nodes with NAME-ldr and NAME-wkr. With
    pods of a GPU memory service on `memory_nodes` nodes, the longest name is NAME-gms-NODE.
    """
    if memory_nodes:
        return 2 * len(component) + len(f"-{MEMORY_SUFFIX}-{memory_nodes - 1}")
    if is_multinode:
        return 2 * len(component) + len(f"-{LEADER_SUFFIX}")
    return 2 * len(component) if has_group else len(component)


def _fnv32a(data: bytes) -> int:
    """Return the FNV-1a hash of 32 bits (http://www.isthe.com/chongo/tech/comp/fnv)."""
    value = 0x811C9DC5
    for byte in data:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value
