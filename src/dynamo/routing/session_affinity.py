"""SessionAffinity: binding of sessions to the worker of their first request, for router modes other than kv.

The worker that accepted a session's request is bound to it; other frontends receive the binding (`sync.affinity_sync`).
If the bound worker has left or is not allowed for the request, the worker that serves the request instead is bound.
"""

from collections.abc import Collection
from typing import Any

from dynamo.core.clock import Clock, SystemClock
from dynamo.kv_router.affinity import Affinity, Mode, Rank, Version
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.routing.sync.affinity_sync import AffinitySync
from dynamo.runtime.distributed import DistributedRuntime


class SessionAffinity:
    """Sessions of one worker set."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        ttl_s: float,
        mode: Mode = "hard",
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._bound = Affinity(ttl_s, mode)
        self.affinity: Affinity | None = self._bound
        self._sync = AffinitySync(runtime, endpoint, self, self._clock)

    async def start(self) -> None:
        """Subscribe to the bindings of other frontends."""
        await self._sync.start()

    async def close(self) -> None:
        """Stop the subscription."""
        await self._sync.close()

    @property
    def is_sound(self) -> bool:
        """False while the subscription to other frontends is interrupted."""
        return self._sync.is_sound

    @property
    def is_hard(self) -> bool:
        """Whether a session uses its worker even above a busy threshold."""
        return self._bound.mode == "hard"

    def find(self, request: PreprocessedRequest, able: Collection[int]) -> int | None:
        """Return the worker of the request's session if it is in `able`."""
        session = session_of(request)[0]
        rank = None if session is None else self._bound.find(session, self._clock.now())
        return rank[0] if rank is not None and rank[0] in able else None

    def sent(self, request: PreprocessedRequest, request_id: str, worker_id: int) -> bool:
        """Record that a worker accepted the request. True if it keeps a session's binding alive until `finish`."""
        session, is_last = session_of(request)
        if session is None:
            return False
        now = self._clock.now()
        self._bound.expire(now)
        if is_last:
            self._bound.end(session)
            return False
        self._bound.bind(session, request_id, (worker_id, 0), now)
        self._sync.bound(session, (worker_id, 0))
        return True

    def finish(self, request_id: str) -> None:
        """Record that the request ended or is sent elsewhere."""
        self._bound.finish(request_id, self._clock.now())

    def bind(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Apply another frontend's binding of a session. False if a newer binding is known."""
        return self._bound.apply(session, rank, version, now)


def session_of(request: PreprocessedRequest) -> tuple[str | None, bool]:
    """Return the session of the request, and whether the request is its last."""
    context: Any = request.agent_context
    if not isinstance(context, dict) or not isinstance(context.get("session_id"), str):
        return None, False
    return context["session_id"], context.get("session_final") is True
