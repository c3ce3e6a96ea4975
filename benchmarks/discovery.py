"""Discovery cost of a thousand workers for the registry and its watchers: files and etcd, in one run.

    python -m benchmarks.discovery [--workers 1000] [--idle-s 10] [--backend file,etcd]

Every worker is a member of its own, with its own lease or its own files, in this process. Printed are the time until a
new member has the whole view, the time from a registration until it is seen, and the idle processor time: per worker
here, and of the etcd process.
"""

import asyncio
import contextlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import write_result
from dynamo.core.codec import json_encode
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.protocols.discovery import INSTANCES, EndpointId, Instance, TransportAddress, record_key
from dynamo.runtime.discovery.base import Discovery, Put, Synced
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.transports.etcd.options import etcd_options

ENDPOINT = EndpointId("dynamo", "backend", "generate")
AT_ONCE = 50
NEWCOMERS = 20
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryBench:
    """Discovery with many workers."""

    workers: int = option(1000, "--workers", None, "How many workers are registered")
    idle_s: float = option(10.0, "--idle-s", None, "How long to measure what they cost while nothing happens")
    quick: bool = option(False, "--quick", None, "No result file")
    backend: list[str] = option(["file", "etcd"], "--backend", None, "Which registries to measure")


@dataclass(frozen=True, slots=True)
class Registry:
    """Discovery backend that the members of one run share."""

    join: Callable[[], Discovery]
    pid: int | None = None
    """Process of the registry itself, if it has one."""


@contextlib.contextmanager
def registry(name: str, folder: Path) -> Iterator[Registry]:
    if name == "file":
        yield Registry(lambda: FileDiscovery(str(folder)))
        return
    from tests.cluster.etcd import EtcdCluster

    with EtcdCluster(folder) as cluster:
        cluster.wait()
        options = etcd_options({"ETCD_ENDPOINTS": cluster.endpoints})
        assert cluster.members[0].process is not None
        yield Registry(lambda: EtcdDiscovery(options=options), cluster.members[0].process.pid)


def record(number: int) -> tuple[str, bytes]:
    """Return a worker's key and value, of a realistic length."""
    instance = Instance(
        component=ENDPOINT.component,
        endpoint=ENDPOINT.name,
        namespace=ENDPOINT.namespace,
        instance_id=(1 << 61) + number,
        transport=TransportAddress(tcp=f"127.0.0.1:40000/{(1 << 61) + number:x}/{ENDPOINT.path}"),
        device_type="cpu",
        request_plane_codec="msgpack",
    )
    return record_key(ENDPOINT, instance.instance_id), json_encode(instance)


async def measure(name: str, config: DiscoveryBench) -> dict[str, float]:
    """Print and return the figures of one registry."""
    with tempfile.TemporaryDirectory() as folder, registry(name, Path(folder)) as place:
        members = [place.join() for _ in range(config.workers)]
        began = time.monotonic()
        for start in range(0, config.workers, AT_ONCE):
            some = enumerate(members[start : start + AT_ONCE], start)
            await asyncio.gather(*(member.put(INSTANCES, *record(number)) for number, member in some))
        found = {"registered_s": time.monotonic() - began}
        print(f"{name}: {config.workers} workers registered in {found['registered_s']:.2f} s")

        reader = place.join()
        await reader.snapshot("v1/nothing")  # Connected first, as a frontend is before it reads.
        began = time.monotonic()
        watch = reader.watch(INSTANCES)
        seen = 0
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(await anext(watch), Synced):
                seen += 1
        assert seen == config.workers, f"{seen} of {config.workers} were seen"
        found["view_ms"] = (time.monotonic() - began) * 1e3
        print(f"{name}: the whole view in {found['view_ms']:.1f} ms")

        waits: list[float] = []
        for number in range(config.workers, config.workers + NEWCOMERS):
            began = time.monotonic()
            await members[0].put(INSTANCES, *record(number))
            async with asyncio.timeout(TIMEOUT_S):
                assert isinstance(await anext(watch), Put)
            waits.append(time.monotonic() - began)
        print(f"{name}: a registration seen after {statistics.median(waits) * 1e3:.1f} ms (median of {NEWCOMERS})")

        began, here, there = time.monotonic(), time.process_time(), processor_s(place.pid)
        await asyncio.sleep(config.idle_s)
        passed = time.monotonic() - began
        each = (time.process_time() - here) / passed / config.workers
        found |= {"registration_ms": statistics.median(waits) * 1e3, "idle_cores_per_worker": each}
        print(f"{name}: idle, each worker takes {each * 100:.4f} % of a core", end="")
        print(f", etcd {(processor_s(place.pid) - there) / passed * 100:.1f} %" if place.pid else "")
        await asyncio.gather(reader.close(), *(member.close() for member in members))
    return found


def processor_s(pid: int | None) -> float:
    """Return user and system time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    config = load(DiscoveryBench, sys.argv[1:], prog="python -m benchmarks.discovery")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8 * config.workers)), hard))
    import uvloop

    found = {name: uvloop.run(measure(name, config)) for name in config.backend}
    print(write_result("discovery", {"workers": config.workers, "backends": found}, is_whole=not config.quick))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
