"""Hardware of a request: products, selection among nodes, and required fields where discovery is unavailable."""

import pytest

from dynamo.operator.reconcile.requests.hardware import HardwareUnknown, gpu_sku, node_gpus, with_discovered
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import Hardware


def node(product: str, count: int = 8, memory: int = 81920) -> KubeObject:
    labels = {
        "nvidia.com/gpu.product": product,
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.memory": str(memory),
    }
    return {"metadata": {"labels": labels}}


H100, L40S = "NVIDIA-H100-80GB-HBM3", "NVIDIA-L40S"


@pytest.mark.parametrize(
    ("product", "sku"),
    [
        (H100, "h100_sxm"),
        ("NVIDIA-H100-PCIe", "h100_pcie"),
        ("NVIDIA-A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie"),
        ("NVIDIA-H200", "h200_sxm"),
        ("NVIDIA-GB200", "gb200"),
        ("NVIDIA-B200", "b200_sxm"),
        (L40S, "l40s"),
        ("NVIDIA-L40", "l40"),
        ("NVIDIA-L4", "l4"),
        ("Tesla-T4", "t4"),
        ("Tesla-V100-SXM2-32GB", "v100_sxm"),
        ("NVIDIA-FUTURE-9", "NVIDIA-FUTURE-9"),
    ],
)
def test_products_become_the_values_of_gpu_sku(product: str, sku: str) -> None:
    assert gpu_sku(product) == sku


def test_given_hardware_is_not_replaced_by_discovery() -> None:
    given = {"gpuSku": "h200_sxm", "vramMb": 143771.0, "numGpusPerNode": 8, "totalGpus": 64}
    assert with_discovered(decode(Hardware, given), None) == given


def test_gpu_of_the_most_nodes_is_selected_and_counted() -> None:
    nodes = [node(L40S, 4, 46068), node(H100), node(L40S, 4, 46068), {"metadata": {}}]
    assert with_discovered(None, nodes) == {"gpuSku": "l40s", "vramMb": 46068.0, "numGpusPerNode": 4, "totalGpus": 8}


def test_gpu_with_more_memory_is_selected_for_equal_node_counts() -> None:
    assert with_discovered(None, [node(L40S, 4, 46068), node(H100)])["gpuSku"] == "h100_sxm"


def test_given_gpu_selects_the_nodes_and_given_values_are_kept() -> None:
    hardware = decode(Hardware, {"gpuSku": "h100_sxm", "numGpusPerNode": 4})
    found = with_discovered(hardware, [node(L40S), node(L40S), node(H100)])
    assert found == {"gpuSku": "h100_sxm", "vramMb": 81920.0, "numGpusPerNode": 4, "totalGpus": 8}


def test_discovered_gpus_are_limited() -> None:
    assert with_discovered(None, [node(H100)] * 10)["totalGpus"] == 32


@pytest.mark.parametrize("nodes", [None, [], [node(L40S)]])
def test_missing_hardware_is_reported_with_its_fields(nodes: list[KubeObject] | None) -> None:
    with pytest.raises(HardwareUnknown, match=r"set spec.hardware.vramMb, .*spec.hardware.totalGpus$"):
        with_discovered(decode(Hardware, {"gpuSku": "h100_sxm"}), nodes)


@pytest.mark.parametrize("labels", [{}, {"nvidia.com/gpu.count": "0"}, {"nvidia.com/gpu.count": "x"}])
def test_nodes_with_incomplete_labels_are_ignored(labels: dict[str, str]) -> None:
    value = node(H100)
    value["metadata"]["labels"] = {**(value["metadata"]["labels"] if labels else {}), **labels}
    assert node_gpus(value) is None
