"""Session affinity: route the turns of a session to the worker of its first turn (`--router-session-affinity-ttl-secs`).

A session is bound when its first request is routed, and stays bound until it has been idle for the time to live; active
requests keep it alive. The router checks on each request whether the bound worker still exists and is eligible, so a stale
binding never outlives a worker. Router replicas exchange bindings with each other; if two replicas bind one session at the same
time, both end up with the same rank.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

SESSIONS_MAX = 65_536
"""Bound on the number of sessions, as upstream; the least recently used session is dropped."""

Mode = Literal["hard", "soft"]
"""`hard`: use the bound worker even above its busy threshold; `soft`: only while it is eligible like any other."""

Rank = tuple[int, int]
Version = tuple[int, int]
"""Version of a binding between replicas: (increasing number, id of the writer). The greatest version wins."""


@dataclass(slots=True)
class Binding:
    """The rank of a session."""

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
        """Session that each active request keeps alive, by request id."""
        self.writer = 0
        """Id of this replica as a writer of bindings."""
        self._number = 0
        """Greatest version number seen."""

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, session: str, now: float) -> Rank | None:
        """Return the session's rank; None if it is not bound or its binding expired."""
        binding = self._bound.get(session)
        if binding is None:
            return None
        if not binding.under_way and now - binding.used_at >= self._ttl_s:
            del self._bound[session]
            return None
        return binding.rank

    def bind(self, session: str, request_id: str, rank: Rank, now: float) -> None:
        """Bind a session to the rank of its request; later requests follow it."""
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
        """Return the version of the session's binding; None if it is not bound."""
        binding = self._bound.get(session)
        return None if binding is None else binding.version

    def observe(self, version: Version) -> None:
        """Record a version from another replica, so that later local bindings are newer."""
        self._number = max(self._number, version[0])

    def apply(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Apply a binding from another replica. Return False if a newer binding exists."""
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
        """Release the session that a finished request kept alive."""
        session = self._requests.pop(request_id, None)
        binding = self._bound.get(session) if session is not None else None
        if binding is not None:
            binding.under_way -= 1
            binding.used_at = max(binding.used_at, now)

    def end(self, session: str) -> None:
        """End a session at the client's request."""
        if session in self._bound:
            self._forget(session)

    def expire(self, now: float) -> None:
        """Drop idle sessions, oldest first."""
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
