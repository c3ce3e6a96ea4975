"""Environment of a recipe's workers."""

from typing import Any

import pytest

from dynamo.ops.interconnect.recipe_env import rows_of_graph
from dynamo.ops.recipes.parts import SourcedObject
from dynamo.ops.report import CheckStatus

GOOD = {"UCX_TLS": "rc_x,cuda_copy,cuda_ipc", "UCX_NET_DEVICES": "mlx5_0:1", "NCCL_IB_HCA": "mlx5"}


def graph(variables: dict[str, str], *, kind: str = "prefill", is_equipped: bool = True) -> SourcedObject:
    main: dict[str, Any] = {
        "name": "main",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    if is_equipped:
        main["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
        main["resources"] = {"limits": {"rdma/ib": "8"}}
    components = [{"name": "W", "type": kind, "podTemplate": {"spec": {"containers": [main]}}}]
    value = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"components": components},
    }
    return SourcedObject("f", value)


def worst(made: SourcedObject) -> CheckStatus:
    order = list(CheckStatus)
    return max((row.status for row in rows_of_graph(made)), key=order.index)


def test_worker_with_transports_devices_and_locked_memory_passes() -> None:
    assert worst(graph(GOOD)) is CheckStatus.PASS


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, CheckStatus.WARN),
        ({**GOOD, "UCX_TLS": "tcp,cuda_copy,cuda_ipc"}, CheckStatus.FAIL),
        ({**GOOD, "UCX_TLS": "rc_x"}, CheckStatus.WARN),
        ({**GOOD, "UCX_TLS": "^tcp"}, CheckStatus.SKIP),
        ({**GOOD, "NCCL_IB_DISABLE": "1"}, CheckStatus.FAIL),
        ({**GOOD, "UCX_RNDV_SCHEME": "put_zcopy"}, CheckStatus.WARN),
    ],
)
def test_variables_that_lead_to_tcp_are_rows(variables: dict[str, str], status: CheckStatus) -> None:
    assert worst(graph(variables)) is status


def test_pod_without_capability_and_device_is_warned_about() -> None:
    rows = [row.evidence for row in rows_of_graph(graph(GOOD, is_equipped=False)) if row.status is CheckStatus.WARN]
    assert len(rows) == 2


def test_worker_without_transfers_is_skipped() -> None:
    assert worst(graph({}, kind="worker")) is CheckStatus.SKIP
