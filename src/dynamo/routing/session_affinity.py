"""SessionAffinity: the turns of a session go to the worker of its first one, where no KV router chooses (serving-plane.md §4.9).

The worker that took a session's request is bound to it; other frontends hear of that (`llm.affinity_sync`). A bound worker
that left, or that the request may not go to, is passed over, and whoever takes the request instead is bound.
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
    """The sessions of one worker set."""

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
        """Begins to hear what other frontends bind."""
        await self._sync.start()

    async def close(self) -> None:
        """Ends that."""
        await self._sync.close()

    @property
    def is_sound(self) -> bool:
        """False while the others are not heard."""
        return self._sync.is_sound

    @property
    def is_hard(self) -> bool:
        """Whether a session goes to its worker even when that is over a busy threshold."""
        return self._bound.mode == "hard"

    def find(self, request: PreprocessedRequest, able: Collection[int]) -> int | None:
        """The worker of the request's session, if it is one of these."""
        session = session_of(request)[0]
        rank = None if session is None else self._bound.find(session, self._clock.now())
        return rank[0] if rank is not None and rank[0] in able else None

    def sent(self, request: PreprocessedRequest, request_id: str, worker_id: int) -> bool:
        """A worker took the request. True where it keeps a session's binding alive until `finish`."""
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
        """The request ended, or goes elsewhere."""
        self._bound.finish(request_id, self._clock.now())

    def bind(self, session: str, rank: Rank, version: Version, now: float) -> bool:
        """Another frontend gave a session to a worker. False where a newer binding is known."""
        return self._bound.hear(session, rank, version, now)


def session_of(request: PreprocessedRequest) -> tuple[str | None, bool]:
    """The session that the request belongs to, and whether it is its last."""
    context: Any = request.agent_context
    if not isinstance(context, dict) or not isinstance(context.get("session_id"), str):
        return None, False
    return context["session_id"], context.get("session_final") is True
