"""Checks of a node from the outputs of its tools."""

import json

import pytest

from dynamo.ops.interconnect.node_checks import ToolOutput, nixl_rows, node_rows, script_values
from dynamo.ops.report import CheckStatus

TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
IBSTAT = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n"
HEALTHY = {
    "ibstat": IBSTAT,
    "peermem": "nvidia 1 0\nnvidia_peermem 1 0\n",
    "gdrcopy": "/dev/gdrdrv\n",
    "topology": TOPOLOGY,
    "efa": "provider: efa\n",
    "memlock": "unlimited\n",
    "environment": "UCX_TLS=rc_x,cuda_copy,cuda_ipc\nHOME=/x\nNCCL_SECRET_KEY=abc\n",
    "ucx": "#      Transport: rc_mlx5\n#      Transport: tcp\n",
    "nixl": '{"version": "1.5", "plugins": ["UCX"], "backends": ["UCX"]}',
    "transfer": '{"gb_per_s": 12.5, "bytes": 67108864, "rounds": 20, "backend": "UCX"}',
    "logs": "NCCL INFO NET/IB : Using mlx5_0\nBackend UCX was instantiated\n",
}


def outputs(**changes: str | None) -> dict[str, ToolOutput]:
    texts = {**HEALTHY, **changes}
    return {name: ToolOutput(status=0, text=text) for name, text in texts.items() if text is not None}


def statuses(**changes: str | None) -> dict[str, CheckStatus]:
    found = outputs(**changes)
    order = list(CheckStatus)
    made: dict[str, CheckStatus] = {}
    for row in (*node_rows(found), *nixl_rows(found)):
        made[row.check] = max(made.get(row.check, row.status), row.status, key=order.index)
    return made


def test_node_with_rdma_and_nvlink_passes() -> None:
    assert set(statuses().values()) == {CheckStatus.PASS}
    text = json.dumps(script_values([*node_rows(outputs()), *nixl_rows(outputs())]))
    assert "12.50 GB/s: 20 reads of 64 MiB between two processes, UCX" in text
    assert "1 links are active, 400 Gb/s" in text
    assert "abc" not in text
    assert '"result": "ok"' in text


@pytest.mark.parametrize(
    ("changes", "check", "status"),
    [
        ({"ibstat": IBSTAT.replace("Active", "Down")}, "links", CheckStatus.FAIL),
        ({"ibstat": IBSTAT + IBSTAT.replace("Active", "Down")}, "links", CheckStatus.WARN),
        ({"ibstat": None}, "links", CheckStatus.SKIP),
        ({"peermem": "nvidia 1 0\n"}, "peermem", CheckStatus.WARN),
        ({"topology": TOPOLOGY.replace("NV18", "SYS")}, "nvlink", CheckStatus.WARN),
        ({"topology": None}, "nvlink", CheckStatus.SKIP),
        ({"memlock": "64"}, "memlock", CheckStatus.WARN),
        ({"environment": "UCX_TLS=tcp"}, "variables", CheckStatus.FAIL),
        ({"environment": "UCX_TLS=rc_x"}, "variables", CheckStatus.WARN),
        ({"environment": "NCCL_IB_DISABLE=1"}, "variables", CheckStatus.FAIL),
        ({"ucx": "# Transport: tcp\n"}, "transports", CheckStatus.FAIL),
        ({"ucx": None}, "transports", CheckStatus.SKIP),
        ({"nixl": '{"error": "ModuleNotFoundError: No module named nixl"}'}, "nixl", CheckStatus.SKIP),
        ({"nixl": '{"error": "RuntimeError: no UCX plugin"}'}, "nixl", CheckStatus.FAIL),
        ({"nixl": "Traceback"}, "nixl", CheckStatus.SKIP),
        ({"transfer": None}, "transfer", CheckStatus.SKIP),
        ({"transfer": HEALTHY["transfer"].replace("12.5", "0.2")}, "transfer", CheckStatus.WARN),
        ({"logs": "NCCL INFO NET/Socket"}, "nccl", CheckStatus.WARN),
    ],
)
def test_each_node_fault_is_a_row(changes: dict[str, str | None], check: str, status: CheckStatus) -> None:
    assert statuses(**changes)[check] is status


def test_links_are_read_from_the_kernel_without_ibstat() -> None:
    ports = (
        "/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE\n/sys/class/infiniband/mlx5_0/ports/1/rate:200 Gb/sec\n"
    )
    assert statuses(ibstat=None, ports=ports)["links"] is CheckStatus.PASS


def test_error_of_a_transfer_is_its_last_line() -> None:
    made = {**outputs(), "transfer": ToolOutput(status=1, text="Traceback\nRuntimeError: NIXL_ERR_BACKEND\n")}
    (row,) = [row for row in nixl_rows(made) if row.check == "transfer"]
    assert (row.status, row.evidence) == (CheckStatus.FAIL, "RuntimeError: NIXL_ERR_BACKEND")
