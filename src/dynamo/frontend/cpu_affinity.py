"""Warning for a frontend that may run on processors of several NUMA nodes."""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_CPU_SYSFS_ROOT = Path("/sys/devices/system/cpu")

WARNING = """{border}
CRITICAL PERFORMANCE WARNING: Frontend CPU affinity spans multiple NUMA nodes!
Running the frontend across multiple NUMA domains is known to cause catastrophic performance issues.
Available CPUs: {cpus}
NUMA nodes: {nodes}
Pin the frontend to CPUs from a single NUMA node, for example with numactl --cpunodebind=0 --membind=0.
{border}"""
BORDER = "=" * 80


def warn_if_frontend_cpu_affinity_spans_numa_nodes(logger: logging.Logger) -> None:
    """Log a warning if this process may run on processors of several NUMA nodes."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
        nodes = sorted({path.name for cpu in cpus for path in (_CPU_SYSFS_ROOT / f"cpu{cpu}").glob("node[0-9]*")})
    except (AttributeError, OSError) as error:  # AttributeError: not on Linux.
        logger.debug("NUMA affinity is not checked: %s", error, exc_info=True)
        return
    if not nodes:
        logger.debug("NUMA affinity is not checked: no NUMA node links found for CPUs %s", ranges_text(cpus))
    elif len(nodes) > 1:
        logger.warning("%s", WARNING.format(border=BORDER, cpus=ranges_text(cpus), nodes=", ".join(nodes)))


def ranges_text(cpus: Iterable[int]) -> str:
    """Return ascending numbers as ranges: `0-3,8-9`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges(cpus))


def ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of ascending numbers."""
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last
