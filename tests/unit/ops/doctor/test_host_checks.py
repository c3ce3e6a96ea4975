"""Checks of GPUs, memory, shared memory, open files and disks."""

from dataclasses import replace

import pytest

from dynamo.ops.doctor.facts import Gpu, GpuFacts, HostFacts, Space
from dynamo.ops.doctor.host_checks import GIB, MIB, gpu_rows, host_rows, size
from dynamo.ops.report import CheckRow, CheckStatus

GPU = Gpu(index="0", name="H200", uuid="GPU-1a", driver="570", memory_mib=143360, used_mib=4, ecc_errors=0)
DISK = Space(use="logs", path="/tmp", total_bytes=100 * GIB, free_bytes=50 * GIB, free_inodes=10_000)
SHM = Space(use="shared memory", path="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB)
HOST = HostFacts(
    cores=8,
    memory_bytes=64 * GIB,
    available_bytes=32 * GIB,
    open_files=65536,
    open_files_max=65536,
    shm=SHM,
    spaces=(DISK,),
)


def of_host(facts: HostFacts) -> dict[str, CheckRow]:
    return {row.check: row for row in host_rows(facts)}


def of_gpus(facts: GpuFacts) -> dict[str, CheckRow]:
    return {row.check: row for row in gpu_rows(facts)}


def test_healthy_host_passes() -> None:
    assert {row.status for row in of_host(HOST).values()} == {CheckStatus.PASS}


@pytest.mark.parametrize(
    ("facts", "check", "status"),
    [
        (replace(HOST, available_bytes=GIB), "memory", CheckStatus.WARN),
        (replace(HOST, available_bytes=MIB), "memory", CheckStatus.FAIL),
        (replace(HOST, shm=None), "shared memory", CheckStatus.SKIP),
        (replace(HOST, shm=replace(SHM, total_bytes=64 * MIB, free_bytes=64 * MIB)), "shared memory", CheckStatus.WARN),
        (replace(HOST, shm=replace(SHM, free_bytes=MIB)), "shared memory", CheckStatus.FAIL),
        (replace(HOST, shm=replace(SHM, is_writable=False)), "shared memory", CheckStatus.FAIL),
        (replace(HOST, open_files=1024), "open files", CheckStatus.WARN),
        (replace(HOST, open_files=64), "open files", CheckStatus.FAIL),
        (replace(HOST, spaces=(replace(DISK, free_bytes=MIB),)), "disk logs", CheckStatus.FAIL),
        (replace(HOST, spaces=(replace(DISK, free_bytes=GIB // 2),)), "disk logs", CheckStatus.WARN),
        (replace(HOST, spaces=(replace(DISK, free_inodes=1),)), "disk logs", CheckStatus.FAIL),
        (replace(HOST, spaces=(replace(DISK, is_writable=False),)), "disk logs", CheckStatus.FAIL),
    ],
)
def test_scarce_resource_has_a_status_and_a_remedy(facts: HostFacts, check: str, status: CheckStatus) -> None:
    row = of_host(facts)[check]
    assert row.status is status
    assert bool(row.remedy) == (status in {CheckStatus.WARN, CheckStatus.FAIL})


def test_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    assert of_host(replace(HOST, open_files=1024))["open files"].remedy == "run: ulimit -n 65536"
    assert "nofile" in of_host(replace(HOST, open_files=1024, open_files_max=1024))["open files"].remedy


def test_machine_without_gpus_is_skipped_and_one_with_a_broken_driver_fails() -> None:
    assert of_gpus(GpuFacts())["gpus"].status is CheckStatus.SKIP
    assert of_gpus(GpuFacts(devices=2))["gpus"].status is CheckStatus.FAIL
    broken = of_gpus(GpuFacts(error="nvidia-smi: Driver/library version mismatch"))["gpus"]
    assert broken.status is CheckStatus.FAIL
    assert "mismatch" in broken.evidence


def test_gpus_are_counted_with_their_driver() -> None:
    assert of_gpus(GpuFacts(gpus=(GPU, replace(GPU, index="1"))))["gpus"].evidence == "2 x H200 140 GiB; driver 570"


def test_used_memory_and_memory_errors_of_a_gpu_are_reported() -> None:
    assert of_gpus(GpuFacts(gpus=(replace(GPU, used_mib=100_000),)))["gpu 0"].status is CheckStatus.WARN
    assert of_gpus(GpuFacts(gpus=(replace(GPU, ecc_errors=2),)))["gpu 0"].status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("visible", "status"),
    [("0", None), ("GPU-1", None), ("0,7", CheckStatus.FAIL), ("", CheckStatus.WARN), ("-1", None)],
)
def test_visible_devices_must_exist(visible: str, status: CheckStatus | None) -> None:
    row = of_gpus(GpuFacts(gpus=(GPU,), visible=visible)).get("CUDA_VISIBLE_DEVICES")
    assert (row.status if row else None) is status


def test_sizes_have_units() -> None:
    assert [size(64 * MIB), size(2 * GIB), size(3 << 40)] == ["64 MiB", "2.0 GiB", "3.0 TiB"]
