"""Replicas of `dynamo serve --planner`: which worker processes to start and stop for the wanted numbers. Pure.

A worker that is stopped drains first and holds its slot and its devices until its process has ended, so neither the limit
of processes nor a device is ever exceeded.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.core.errors import ConfigError


class ReplicaState(enum.Enum):
    """State of one worker process."""

    RUNNING = "running"
    """Started, or waiting for its restart after a crash."""
    DRAINING = "draining"
    """Received SIGTERM; it completes its requests first."""
    KILLED = "killed"
    """Its time to drain is over."""


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Start a worker."""

    role: str
    number: int
    devices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the process."""
        return f"{self.role}-{self.number}"


@dataclass(frozen=True, slots=True)
class StopReplica:
    """Send SIGTERM: the worker leaves discovery, completes its requests and ends."""

    name: str


@dataclass(frozen=True, slots=True)
class KillReplica:
    """End a worker whose time to drain is over."""

    name: str


ReplicaAction = StartReplica | StopReplica | KillReplica


class DevicePool:
    """GPUs of the machine, of which each worker holds some. One owner."""

    def __init__(self, devices: Sequence[str], per_worker: int) -> None:
        """Raise `ConfigError` for fewer devices than one worker needs."""
        if per_worker > len(devices):
            raise ConfigError(
                f"--gpus-per-worker {per_worker}: must be at most {len(devices)}, the GPUs of this machine"
            )
        self._free = list(devices)
        self._order = {device: index for index, device in enumerate(devices)}
        self._per_worker = per_worker
        self._held: dict[str, tuple[str, ...]] = {}

    @property
    def capacity(self) -> int:
        """Return how many workers the devices suffice for."""
        return len(self._order) // self._per_worker

    def take(self, name: str) -> tuple[str, ...] | None:
        """Return the devices of a worker; None while too few are free."""
        if name not in self._held:
            if len(self._free) < self._per_worker:
                return None
            self._held[name] = tuple(self._free[: self._per_worker])
            del self._free[: self._per_worker]
        return self._held[name]

    def release(self, name: str) -> None:
        """Return a worker's devices to the pool."""
        self._free += self._held.pop(name, ())
        self._free.sort(key=self._order.__getitem__)


@dataclass(slots=True)
class Replica:
    """One worker process."""

    role: str
    number: int
    state: ReplicaState = ReplicaState.RUNNING
    stopped_at: float = 0.0


class Replicas:
    """The worker processes of a graph, and the numbers of them that are wanted. One owner; time is an argument."""

    def __init__(
        self, wanted: Mapping[str, int], *, limit: int, drain_s: float, devices: DevicePool | None = None
    ) -> None:
        """`wanted`: workers of each role; `limit`: most processes of all roles; `drain_s`: most seconds of a drain."""
        self._wanted = dict(wanted)
        self._limit = limit
        self._drain_s = drain_s
        self._devices = devices
        self._replicas: dict[str, Replica] = {}

    @property
    def wanted(self) -> dict[str, int]:
        """Return the wanted number of workers of each role."""
        return dict(self._wanted)

    def running(self, role: str) -> int:
        """Return the number of workers of a role that are not ending."""
        return len(self._of(role, ReplicaState.RUNNING))

    @property
    def names(self) -> list[str]:
        """Return the names of all processes, also of those that are ending."""
        return list(self._replicas)

    @property
    def is_settled(self) -> bool:
        """Return whether the processes are those that are wanted."""
        return all(self.running(role) == number for role, number in self._wanted.items()) and not self._ending()

    def want(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Set the wanted numbers, within 1 and the limit; return them.

        Where the sum exceeds the limit, the role with the most workers is reduced first.
        """
        for role, number in wanted.items():
            if role in self._wanted:
                self._wanted[role] = max(1, number)
        while sum(self._wanted.values()) > self._limit and max(self._wanted.values()) > 1:
            largest = max(self._wanted, key=lambda role: self._wanted[role])
            self._wanted[largest] -= 1
        return self.wanted

    def reconcile(self, now: float) -> list[ReplicaAction]:
        """Return what to do now; the replicas change as if it were done."""
        actions: list[ReplicaAction] = []
        for role, number in self._wanted.items():
            surplus = self.running(role) - number
            for name in self._newest(role)[: max(0, surplus)]:
                self._replicas[name].state, self._replicas[name].stopped_at = ReplicaState.DRAINING, now
                actions.append(StopReplica(name))
        for name, replica in self._replicas.items():
            if replica.state is ReplicaState.DRAINING and now - replica.stopped_at >= self._drain_s:
                replica.state = ReplicaState.KILLED
                actions.append(KillReplica(name))
        for role, number in self._wanted.items():
            for _ in range(number - self.running(role)):
                started = self._start(role)
                if started is None:
                    break
                actions.append(started)
        return actions

    def exited(self, name: str) -> bool:
        """Record the end of a process; return whether it was stopped on purpose, so that it is no crash.

        A crashed worker keeps its slot and its devices: it is started again, or `give_up` follows.
        """
        replica = self._replicas.get(name)
        if replica is None or replica.state is ReplicaState.RUNNING:
            return False
        self.give_up(name)
        return True

    def give_up(self, name: str) -> None:
        """Remove a process that has ended and is not started again; `reconcile` replaces it if it is wanted."""
        self._replicas.pop(name, None)
        if self._devices is not None:
            self._devices.release(name)

    def lose(self, name: str) -> bool:
        """Continue without a crashed worker, until another number is wanted; return False for the last one of its role."""
        replica = self._replicas.get(name)
        if replica is None or self.running(replica.role) < 2:
            return False
        self.give_up(name)
        self._wanted[replica.role] = min(self._wanted[replica.role], self.running(replica.role))
        return True

    def _start(self, role: str) -> StartReplica | None:
        if len(self._replicas) >= self._limit:
            return None
        taken = {one.number for one in self._replicas.values() if one.role == role}
        number = next(number for number in range(1, self._limit + 1) if number not in taken)
        started = StartReplica(role, number)
        if self._devices is not None:
            devices = self._devices.take(started.name)
            if devices is None:
                return None
            started = StartReplica(role, number, devices)
        self._replicas[started.name] = Replica(role, number)
        return started

    def _newest(self, role: str) -> list[str]:
        """Return the running workers of a role, those with the largest number first: they have the least cached."""
        found = self._of(role, ReplicaState.RUNNING)
        return sorted(found, key=lambda name: -self._replicas[name].number)

    def _of(self, role: str, state: ReplicaState) -> list[str]:
        return [name for name, one in self._replicas.items() if one.role == role and one.state is state]

    def _ending(self) -> int:
        return sum(one.state is not ReplicaState.RUNNING for one in self._replicas.values())
