"""Affinity: the turns of a session go to the worker of its first one (serving-plane.md §4.9, `--router-session-affinity-ttl-secs`).

A session is bound when its first request is given a worker, and stays so until it has been idle for the time to live;
requests under way keep it. Whether the bound worker still exists, and may be chosen, is the router's to say each time:
nothing here outlives what the router knows (lessons.md C21). Routers of the same workers may tell each other of their
bindings (`hear`); two that bind a session at once end up with the same rank.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

SESSIONS_MAX = 65_536
"""Beyond it the session that was used longest ago is forgotten; upstream's bound."""

Mode = Literal["hard", "soft"]
"""`hard`: its worker even when that is over a busy threshold; `soft`: its worker while that may be chosen like others."""

Rank = tuple[int, int]
Version = tuple[int, int]
"""Of a binding, where several routers bind: a number that grows, and who bound. The greatest is in force."""


@dataclass(slots=True)
class Binding:
    """Where a session goes."""

    rank: Rank
    used_at: float
    under_way: int
    version: Version = (0, 0)


class Affinity:
    """Sessions and their ranks, least recently used first."""

    def __init__(self, ttl_s: float, mode: Mode = "hard", sessions_max: int = SESSIONS_MAX) -> None:
        self.mode: Mode = mode
        self._ttl_s = ttl_s
        self._sessions_max = sessions_max
        self._bound: OrderedDict[str, Binding] = OrderedDict()
        self._requests: dict[str, str] = {}
        """By request, the session that it keeps."""
        self.writer = 0
        """Who binds here, where several routers do."""
        self._number = 0
        """The greatest number of a version that was seen."""

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, session: str, now: float) -> Rank | None:
        """The session's rank; None where it has none, or has had none for too long."""
        binding = self._bound.get(session)
        if binding is None:
            return None
        if not binding.under_way and now - binding.used_at >= self._ttl_s:
            del self._bound[session]
            return None
        return binding.rank

    def bind(self, session: str, request_id: str, rank: Rank, now: float) -> None:
        """A request of the session was given to a rank; from now on the others are too."""
        self.finish(request_id, now)
        binding = self._bound.get(session)
        if binding is None:
            binding = self._bound[session] = Binding(rank, now, 0)
        self._number += 1
        binding.rank, binding.used_at, binding.version = rank, now, (self._number, self.writer)
        binding.under_way += 1
        self._requests[request_id] = session
        self._used(session)

    def version_of(self, session: str) -> Version | None:
        """Of its binding; None where it has none."""
        binding = self._bound.get(session)
        return None if binding is None else binding.version

    def observe(self, version: Version) -> None:
        """Another router bound something: what is bound here afterwards is newer."""
        self._number = max(self._number, version[0])

    def hear(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Another router bound a session. False where a newer binding is known."""
        self.observe(version)
        binding = self._bound.get(session)
        if binding is None:
            self._bound[session] = Binding(rank, now, 0, version)
        elif version < binding.version:
            return False
        else:
            binding.rank, binding.version, binding.used_at = rank, version, max(now, binding.used_at)
        self._used(session)
        return True

    def _used(self, session: str) -> None:
        self._bound.move_to_end(session)
        while len(self._bound) > self._sessions_max:
            self._forget(next(iter(self._bound)))

    def finish(self, request_id: str, now: float) -> None:
        """A request ended."""
        session = self._requests.pop(request_id, None)
        binding = self._bound.get(session) if session is not None else None
        if binding is not None:
            binding.under_way -= 1
            binding.used_at = max(binding.used_at, now)

    def end(self, session: str) -> None:
        """The client said that the session is over."""
        if session in self._bound:
            self._forget(session)

    def expire(self, now: float) -> None:
        """Forgets idle sessions, oldest first."""
        idle = []
        for session, binding in self._bound.items():
            if now - binding.used_at < self._ttl_s:
                break
            if not binding.under_way:
                idle.append(session)
        for session in idle:
            self._forget(session)

    def _forget(self, session: str) -> None:
        binding = self._bound.pop(session)
        if binding.under_way:
            for request_id in [one for one, its in self._requests.items() if its == session]:
                del self._requests[request_id]
