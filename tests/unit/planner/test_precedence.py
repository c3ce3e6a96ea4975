"""Precedence among planners of one namespace: the smallest id scales; advisory ones never hold another; released ones never hold."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.memory import MemoryCluster

from dynamo.planner.precedence import Precedence
from dynamo.protocols.discovery import INSTANCES


@pytest.fixture
async def cluster() -> AsyncIterator[MemoryCluster]:
    cluster = MemoryCluster()
    yield cluster
    await cluster.shutdown()


def status() -> dict[str, Any]:
    return {}


async def joined(cluster: MemoryCluster, namespace: str = "ns", *, is_advisory: bool = False) -> tuple[int, Precedence]:
    runtime = cluster.runtime()
    made = Precedence(runtime, namespace, is_advisory=is_advisory)
    await made.join(status)
    return runtime.instance_id, made


async def test_planner_with_the_smallest_id_scales_and_the_next_one_follows_it(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (first, acting), (_, held) = sorted([await joined(cluster), await joined(cluster)], key=lambda one: one[0])
    for _ in range(2):
        assert await acting.preceding() == ""
        assert await held.preceding() == f"planner {first:x} of the same namespace has precedence"
    assert sum("records decisions and does not scale" in one for one in caplog.messages) == 1
    await acting.leave()
    assert await held.preceding() == ""
    assert "scales from now on" in caplog.messages[-1]


async def test_advisory_planners_and_planners_of_other_namespaces_hold_no_planner(cluster: MemoryCluster) -> None:
    _, acting = await joined(cluster)
    for _ in range(4):
        _, advisory = await joined(cluster, is_advisory=True)
        assert await advisory.preceding() == ""
        await joined(cluster, "other")
    assert await acting.preceding() == ""


@pytest.mark.parametrize("instance_id", [1, 2**63 - 1])
async def test_released_planner_has_precedence_regardless_of_its_id(cluster: MemoryCluster, instance_id: int) -> None:
    _, held = await joined(cluster)
    await cluster.runtimes[0].discovery.put(INSTANCES, f"ns/Planner/generate/{instance_id:x}", b"{}")
    assert await held.preceding() == f"planner {instance_id:x} of the same namespace, a released one, has precedence"
