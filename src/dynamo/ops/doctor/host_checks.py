"""Checks of GPUs, memory, shared memory, open files and disks. Pure."""

from collections.abc import Iterator

from dynamo.ops.doctor.facts import GpuFacts, HostFacts, Space
from dynamo.ops.report import CheckRow, failed, passed, skipped, warned

GIB, MIB = 1 << 30, 1 << 20
MEMORY_WARN, MEMORY_FAIL = 2 * GIB, 256 * MIB
"""Available memory: a frontend and one worker of the demo model take some hundreds of MiB."""
SHM_CONTAINER = 64 * MIB  # Docker's default; NCCL and engines with several processes fail with it.
SHM_FREE = 16 * MIB
FILES_WARN, FILES_FAIL = 4096, 256
"""Soft limit of open files: each client and each connection to a worker takes one."""
DISK_WARN, DISK_FAIL = 1 * GIB, 64 * MIB
INODES_FAIL = 100
GPU_FULL = 0.5
"""Share of used memory above which an engine with its usual 0.9 of the memory does not fit."""


def gpu_rows(facts: GpuFacts) -> Iterator[CheckRow]:
    """Yield the rows of the GPUs and their driver."""
    if not facts.gpus:
        if facts.error or facts.devices:
            evidence = facts.error or f"{facts.devices} device files, but nvidia-smi is not installed"
            yield failed(
                "gpus",
                evidence,
                "check the driver: nvidia-smi must list the GPUs; in a container start it with --gpus all",
            )
        else:
            yield skipped("gpus", "none; the engines cpu and mocker need none")
        return
    names = sorted({f"{one.name} {one.memory_mib // 1024} GiB" for one in facts.gpus})
    yield passed("gpus", f"{len(facts.gpus)} x {', '.join(names)}; driver {facts.gpus[0].driver}")
    invisible = _invisible(facts)
    if invisible:
        yield failed(
            "CUDA_VISIBLE_DEVICES",
            f"{facts.visible!r} names {', '.join(invisible)}; this machine has {len(facts.gpus)} GPUs",
            f"use indexes from 0 to {len(facts.gpus) - 1}, or unset the variable",
        )
    elif facts.visible is not None and not facts.visible.strip():
        yield warned("CUDA_VISIBLE_DEVICES", "is empty: CUDA programs find no GPU", "unset it to use all GPUs")
    for one in facts.gpus:
        if one.ecc_errors:
            yield failed(
                f"gpu {one.index}",
                f"{one.ecc_errors} uncorrected memory errors",
                "drain the machine and reset the GPU; replace it if the errors return",
            )
        elif one.memory_mib and one.used_mib > GPU_FULL * one.memory_mib:
            yield warned(
                f"gpu {one.index}",
                f"{one.used_mib} of {one.memory_mib} MiB are in use",
                "find the process with nvidia-smi; an engine that starts now may run out of memory",
            )


def _invisible(facts: GpuFacts) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that name no GPU of this machine."""
    words = [word.strip() for word in (facts.visible or "").split(",") if word.strip()]
    uuids = [one.uuid for one in facts.gpus]
    return [
        word
        for word in words
        if not word.startswith("-")
        and not (word.isdigit() and int(word) < len(uuids))
        and not any(uuid.startswith(word) for uuid in uuids)
        and not word.startswith("MIG-")
    ]


def host_rows(facts: HostFacts) -> Iterator[CheckRow]:
    """Yield the rows of memory, shared memory, open files and disks."""
    yield _memory(facts)
    if facts.shm is None:
        yield skipped("shared memory", "this system has no /dev/shm")
    else:
        yield _shm(facts.shm)
    yield _open_files(facts)
    for space in facts.spaces:
        yield _disk(space)


def _memory(facts: HostFacts) -> CheckRow:
    evidence = f"{size(facts.available_bytes)} of {size(facts.memory_bytes)} available, {facts.cores} cores"
    if facts.available_bytes < MEMORY_FAIL:
        return failed("memory", evidence, "end other processes, or raise the container's memory limit")
    if facts.available_bytes < MEMORY_WARN:
        return warned(
            "memory", evidence, "enough for the demo model; a real checkpoint needs its size and the KV cache"
        )
    return passed("memory", evidence)


def _shm(space: Space) -> CheckRow:
    evidence = f"{space.path}: {size(space.free_bytes)} of {size(space.total_bytes)} free"
    if space.error or not space.is_writable:
        return failed(
            "shared memory",
            f"{space.path}: {space.error or 'not writable'}",
            f"run as a user that can write there, or: chmod 1777 {space.path}",
        )
    if space.free_bytes < SHM_FREE:
        return failed("shared memory", evidence, f"remove abandoned files in {space.path}, or make it larger")
    if space.total_bytes <= SHM_CONTAINER:
        return warned(
            "shared memory",
            evidence,
            "tensor-parallel engines and KV transfer need more; use docker run --shm-size=8g, or sharedMemory in Kubernetes",
        )
    return passed("shared memory", evidence)


def _open_files(facts: HostFacts) -> CheckRow:
    evidence = f"soft limit {facts.open_files}, hard limit {facts.open_files_max}"
    remedy = f"run: ulimit -n {min(65536, facts.open_files_max)}"
    if facts.open_files_max < FILES_WARN:
        remedy = "raise LimitNOFILE of the service, or nofile in /etc/security/limits.conf"
    if facts.open_files < FILES_FAIL:
        return failed("open files", evidence, remedy)
    if facts.open_files < FILES_WARN:
        return warned("open files", f"{evidence}; each client takes one", remedy)
    return passed("open files", evidence)


def _disk(space: Space) -> CheckRow:
    name = f"disk {space.use}"
    if space.error or not space.is_writable:
        evidence = f"{space.path}: {space.error or 'not writable'}"
        return failed(name, evidence, "choose another directory, or let this user write there")
    evidence = f"{space.path}: {size(space.free_bytes)} of {size(space.total_bytes)} free"
    if space.free_bytes < DISK_FAIL:
        return failed(name, evidence, "free space there, or choose another directory")
    if space.free_inodes is not None and space.free_inodes < INODES_FAIL:
        return failed(name, f"{evidence}; {space.free_inodes} free inodes", "remove files there")
    if space.free_bytes < DISK_WARN:
        return warned(name, evidence, "logs, downloads and KV tiers on disk need more")
    return passed(name, evidence)


def size(count: int) -> str:
    """Return a number of bytes in MiB, GiB or TiB."""
    if count >= 1 << 40:
        return f"{count / (1 << 40):.1f} TiB"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
