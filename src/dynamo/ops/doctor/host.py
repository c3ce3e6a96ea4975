"""Collector of GPUs, memory, shared memory, open files and disks."""

import os
import re
import resource
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from dynamo.core.errors import StartupError
from dynamo.core.private_paths import refusal, temporary_directory
from dynamo.ops.doctor.facts import Gpu, GpuFacts, HostFacts, Space

SMI_S = 5.0  # A driver that hangs must not stop the other checks.
GPU_FIELDS = "index,name,uuid,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
CGROUP = "/sys/fs/cgroup"
SHM = "/dev/shm"  # noqa: S108 - the system's shared memory itself


def gpu_facts(variables: Mapping[str, str]) -> GpuFacts:
    """Return the GPUs that nvidia-smi reports."""
    devices = 0
    with suppress(OSError):
        devices = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)  # noqa: S603
    except FileNotFoundError:
        return GpuFacts(devices=devices, visible=visible)
    except (OSError, subprocess.TimeoutExpired) as error:
        return GpuFacts(devices=devices, visible=visible, error=f"nvidia-smi: {error}")
    gpus = parse_gpus(done.stdout) if done.returncode == 0 else ()
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    reason = "" if gpus or (done.returncode == 0 and not lines) else f"nvidia-smi: {' '.join(lines)[:300]}"
    return GpuFacts(gpus=gpus, devices=devices, visible=visible, error=reason)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's CSV; lines of another form are skipped."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS.split(",")):
            continue
        index, name, uuid, driver, memory, used, errors = cells
        found.append(
            Gpu(
                index=index,
                name=name,
                uuid=uuid,
                driver=driver,
                memory_mib=int(memory) if memory.isdigit() else 0,
                used_mib=int(used) if used.isdigit() else 0,
                ecc_errors=int(errors) if errors.isdigit() else None,
            )
        )
    return tuple(found)


def host_facts(directories: Sequence[tuple[str, str]], temporary: Space) -> HostFacts:
    """Return the resources; `directories` are pairs of a use and a path, for the other disks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total, available = memory(_text("/proc/meminfo"), _text(f"{CGROUP}/memory.max"), _text(f"{CGROUP}/memory.current"))
    return HostFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        available_bytes=available,
        open_files=_limit(soft),
        open_files_max=_limit(hard),
        shm=space("shared memory", SHM) if os.path.isdir(SHM) else None,
        spaces=(temporary, *(space(use, path) for use, path in directories)),
    )


def memory(meminfo: str, limit: str, current: str) -> tuple[int, int]:
    """Return total and available bytes, from /proc/meminfo and the container's limit and use."""
    found = {name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)}
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    if not total and hasattr(os, "sysconf"):  # No /proc: macOS.
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit.strip().isdigit() and int(limit) < total:
        total = int(limit)
        used = int(current) if current.strip().isdigit() else 0
        available = min(available, max(0, total - used))
    return total, available


def temporary_space(named: str) -> Space:
    """Return the space of the temporary directory; `named` is TMPDIR, which Python replaces silently if it is not usable."""
    problem = refusal(named) if named else ""
    try:
        path = temporary_directory()
    except StartupError as error:
        what, _, reasons = str(error).partition(": ")
        return Space(use="temporary", path=what, error=reasons)
    if problem:
        return Space(use="temporary", path=f"TMPDIR={named}", error=f"{problem}; {path} is used instead")
    return space("temporary", path)


def space(use: str, path: str) -> Space:
    """Return the space of the file system of a directory, or of its nearest existing parent."""
    at = os.path.abspath(path)
    while not os.path.exists(at) and at != os.path.dirname(at):
        at = os.path.dirname(at)
    try:
        found = os.statvfs(at)
    except OSError as error:
        return Space(use=use, path=path, error=error.strerror or str(error))
    return Space(
        use=use,
        path=path,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        free_inodes=found.f_favail if found.f_files else None,
        is_writable=os.access(at, os.W_OK),
    )


def _limit(value: int) -> int:
    return (1 << 31) - 1 if value == resource.RLIM_INFINITY else value


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
