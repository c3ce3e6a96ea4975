"""GPUs of the cluster, from the labels of GPU feature discovery: what a request does not say about its hardware."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.protocols.kubernetes.common import KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import Hardware

PRODUCT, COUNT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.memory"
MAX_DISCOVERED_GPUS = 32
"""Limit of a discovered number of GPUs: it bounds the search of the profiler. `hardware.totalGpus` exceeds it."""
FAMILIES = (
    ("GB200", "gb200"), ("GB10", "gb10"), ("NVL72", "vr_nvl72"), ("B300", "b300"), ("B200", "b200"), ("H200", "h200"),
    ("H100", "h100"), ("A100", "a100"), ("V100", "v100"), ("L40S", "l40s"), ("L40", "l40"), ("A30", "a30"), ("L4", "l4"),
    ("T4", "t4"), ("MI300", "mi300"), ("MI200", "mi200"), ("MI250", "mi200"), ("MI210", "mi200"),
)  # fmt: skip
"""Part of a product's name and the family it names; longer names precede those that they contain."""
WITH_PCIE = frozenset({"h100", "a100", "v100"})
WITH_SXM = frozenset({"b300", "b200", "h200"}) | WITH_PCIE
ALIASES = {"gb200_sxm": "gb200"}
"""Legacy values of `gpuSku`."""
REQUIRED = ("gpuSku", "vramMb", "numGpusPerNode", "totalGpus")


class HardwareUnknown(ValueError):
    """The hardware is neither given nor discovered; the message names the fields to set."""


@dataclass(frozen=True, slots=True, order=True)
class NodeGpus:
    """GPUs of one node."""

    sku: str
    memory_mb: int
    """Memory of one GPU in MiB."""
    count: int


def gpu_sku(product: str) -> str:
    """Return the value of `gpuSku` for the product name of a label, or the name itself if it is not known."""
    text = product.upper().replace("-", "").replace(" ", "").replace("_", "")
    family = next((family for part, family in FAMILIES if part in text), None)
    if family is None:
        return product
    if family in WITH_PCIE and "PCIE" in text:
        return f"{family}_pcie"
    return f"{family}_sxm" if family in WITH_SXM else family


def node_gpus(node: KubeObject) -> NodeGpus | None:
    """Return the GPUs of a node, or None if its labels do not give them."""
    labels = node.get("metadata", {}).get("labels") or {}
    count, memory = str(labels.get(COUNT, "")), str(labels.get(MEMORY, ""))
    if not (labels.get(PRODUCT) and count.isdecimal() and memory.isdecimal() and int(count) and int(memory)):
        return None
    return NodeGpus(gpu_sku(labels[PRODUCT]), int(memory), int(count))


def is_complete(hardware: Hardware | None) -> bool:
    """Return whether a request gives everything that would be discovered."""
    return hardware is not None and encode(hardware).keys() >= set(REQUIRED)


def with_discovered(hardware: Hardware | None, nodes: Iterable[KubeObject] | None) -> KubeObject:
    """Return the hardware of a request with what it lacks filled in from the nodes.

    A given `gpuSku` selects nodes. Without one, the GPU of most nodes is taken, of equal ones that with the most
    memory. `nodes` is None if they may not be read. Raise `HardwareUnknown` if something remains unknown.
    """
    result = {} if hardware is None else encode(hardware)
    if "gpuSku" in result:
        result["gpuSku"] = ALIASES.get(result["gpuSku"], result["gpuSku"])
    missing = [name for name in REQUIRED if name not in result]
    if not missing:
        return result
    found = [gpus for node in nodes or () if (gpus := node_gpus(node)) is not None]
    if "gpuSku" in result:
        found = [one for one in found if one.sku == result["gpuSku"]]
    if not found:
        raise HardwareUnknown(_unknown(missing, result.get("gpuSku"), is_readable=nodes is not None))
    return _values_of(_most_common(found)) | result


def _most_common(found: Sequence[NodeGpus]) -> list[NodeGpus]:
    by_sku: dict[str, list[NodeGpus]] = defaultdict(list)
    for one in found:
        by_sku[one.sku].append(one)
    return max(by_sku.values(), key=lambda group: (len(group), max(one.memory_mb for one in group), group[0].sku))


def _values_of(group: Sequence[NodeGpus]) -> KubeObject:
    return {
        "gpuSku": group[0].sku,
        "vramMb": float(max(one.memory_mb for one in group)),
        "numGpusPerNode": max(one.count for one in group),
        "totalGpus": min(sum(one.count for one in group), MAX_DISCOVERED_GPUS),
    }


def _unknown(missing: Sequence[str], sku: str | None, *, is_readable: bool) -> str:
    fields = ", ".join(f"spec.hardware.{name}" for name in missing)
    if not is_readable:
        return f"GPU hardware is required but nodes cannot be read: set {fields}"
    of = f" with GPUs {sku}" if sku else ""
    return f"GPU hardware is required but no node{of} has the labels {PRODUCT}, {COUNT} and {MEMORY}: set {fields}"
