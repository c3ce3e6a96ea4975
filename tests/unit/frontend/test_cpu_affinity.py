"""Warning for processors of several NUMA nodes."""

import logging
import os
from pathlib import Path

import pytest

from dynamo.frontend import cpu_affinity

logger = logging.getLogger("test.cpu_affinity")


def warned(root: Path, cpus: dict[int, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, node in cpus.items():
        if node is not None:
            (root / f"cpu{cpu}" / f"node{node}").mkdir(parents=True)
    monkeypatch.setattr(cpu_affinity, "_CPU_SYSFS_ROOT", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)
    cpu_affinity.warn_if_frontend_cpu_affinity_spans_numa_nodes(logger)


def test_processors_of_two_numa_nodes_are_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warned(tmp_path, {0: 0, 1: 0, 2: 0, 9: 1, 8: 1, 12: 1}, monkeypatch)
    assert "Available CPUs: 0-2,8-9,12\nNUMA nodes: node0, node1" in caplog.text


@pytest.mark.parametrize("cpus", [{0: 0, 1: 0}, {8: None}, {}])
def test_single_numa_node_gives_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cpus: dict[int, int | None]
) -> None:
    warned(tmp_path, cpus, monkeypatch)
    assert caplog.text == ""


def test_unreadable_affinity_gives_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> set[int]:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        cpu_affinity.warn_if_frontend_cpu_affinity_spans_numa_nodes(logger)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "not permitted" in caplog.text
