"""Machine: the cores, ports and GPUs that `dynamo serve` distributes to its processes."""

import errno
import os
import socket
from collections.abc import Collection, Mapping

from dynamo.cli.autoscale import visible_devices
from dynamo.cli.options import ServeConfig
from dynamo.cli.replicas import DevicePool
from dynamo.core.boundaries import Rollback
from dynamo.core.errors import ConfigError, StartupError

BASES = 16
"""Ranges of worker ports that are tried: one for each graph of the machine."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port, to a free one for 0. Raises `StartupError` before any process is started.

    It does not listen, so the frontend, which binds with SO_REUSEADDR too, can listen on the port; the kernel gives the
    port to no outgoing connection and to no process that requests any free port.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--http-port {port}: must be from 0 to 65535 (0 chooses a free port)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
        with Rollback(reserved.close):
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"--http-host {host!r}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"--http-port {port} is in use by another process; choose another with --http-port, or 0 for a free one"
            ) from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return reserved


def free_port_base(base: int, offsets: Collection[int], step: int) -> int:
    """Return the first of `BASES` ranges, `step` ports apart, in which the ports at these offsets are free."""
    for candidate in range(base, base + BASES * step, step):
        if all(is_free(candidate + offset) for offset in offsets):
            return candidate
    raise StartupError(f"ports {base} to {base + BASES * step - 1}: all ranges for workers are in use by other graphs")


def is_free(port: int) -> bool:
    """Return whether a process can listen on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def devices_of(serve: ServeConfig, needed: int, variables: Mapping[str, str]) -> DevicePool | None:
    """Return the GPUs for the workers; None if they use none or share all.

    `needed` GPUs are required by each worker's parallel sizes, unless --gpus-per-worker is given. Raise `ConfigError` if
    they do not suffice.
    """
    if serve.gpus_per_worker == 0 or (serve.gpus_per_worker is None and not needed):
        return None
    devices = visible_devices(variables)
    if serve.gpus_per_worker is None and not devices:  # An engine built for CPUs.
        return None
    per_worker = serve.gpus_per_worker or needed
    flag = "--gpus-per-worker" if serve.gpus_per_worker else "parallel sizes: GPUs per worker"
    if per_worker > len(devices):
        raise ConfigError(f"{flag} {per_worker}: must be at most {len(devices)}, the GPUs of this machine")
    pool = DevicePool(devices, per_worker)
    if serve.most_workers > pool.capacity:
        word, number = ("--max-workers", serve.max_workers) if serve.max_workers else ("workers", serve.most_workers)
        raise ConfigError(
            f"{word} {number}: must be at most {pool.capacity}, for which the GPUs suffice "
            f"({flag} {per_worker}); --gpus-per-worker 0 lets all workers share all GPUs"
        )
    return pool
