"""Placement: choice of a worker for a token request whose response is relayed.

A KV router, if present, chooses and counts the request as its worker's until `release`. Otherwise the request itself
decides, then its session, then the client's router mode.
"""

from collections.abc import Mapping

import msgspec

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.kv_router.router import Decision
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.routing.kv_push_router import KvPushRouter, RequestProgress
from dynamo.routing.session_affinity import SessionAffinity
from dynamo.serving.request_headers import Headers, agent_context, with_headers
from dynamo.serving.served_model import ServedModel
from dynamo.text.preprocessor import routing_of


class Placement:
    """Worker placement of one request."""

    def __init__(self, model: ServedModel, request: PreprocessedRequest, body: bytes = b"") -> None:
        """`body`: the bytes for the worker, if they differ from the encoded request."""
        self._model = model
        self._request = request
        self._body = body
        self._booked: tuple[KvPushRouter | SessionAffinity, str] | None = None
        self.decision: Decision | None = None
        """Latest decision of the router."""

    @property
    def chosen(self) -> int | None:
        """Worker that the request names. Raise `InvalidArgument` for an unknown worker."""
        routing = self._request.routing
        chosen = routing.backend_instance_id if routing is not None else None
        if chosen is not None and chosen not in self._model.client.instance_ids():
            raise InvalidArgument(f"backend_instance_id {chosen} is not a worker of model `{self._model.name}`")
        return chosen

    @property
    def is_free(self) -> bool:
        """Whether another worker may be chosen if the chosen one is unreachable."""
        return self.chosen is None

    async def choose(
        self, request_id: str, progress: RequestProgress, tried: frozenset[int], metadata: Mapping[str, str]
    ) -> tuple[bytes, int | None]:
        """Return body and worker; None if the client's mode chooses. Raise the errors of the router."""
        self.release()
        chosen = self.chosen
        found = await self._model.choose(self._request, request_id, progress, tried, metadata)
        if found is None:
            bound = self._model.bound(self._request, tried) if chosen is None else chosen
            return self._body or msgpack_encode(self._request), bound
        served, decision = found
        if served.kv is not None:
            self._booked = served.kv, request_id
        self.decision = decision
        if self._body:
            return self._body, decision.worker_id
        routing = msgspec.structs.replace(self._request.routing or Routing(), dp_rank=decision.dp_rank)
        return msgpack_encode(msgspec.structs.replace(self._request, routing=routing)), decision.worker_id

    def sent(self, request_id: str, worker_id: int) -> None:
        """Record that the worker accepted the request."""
        sessions = self._model.current.sessions
        if sessions is not None and sessions.sent(self._request, request_id, worker_id):
            self._booked = sessions, request_id

    def release(self) -> None:
        """Release the request's worker in the router or session that counts it."""
        booked, self._booked = self._booked, None
        if booked is not None:
            keeper, request_id = booked
            if isinstance(keeper, SessionAffinity):
                keeper.finish(request_id)
            else:
                keeper.release(request_id)


def headed(request: PreprocessedRequest, headers: Headers) -> PreprocessedRequest:
    """Return the request with routing and session from its headers, which take precedence."""
    context = agent_context(headers, "other")
    if context is not None:
        request = msgspec.structs.replace(request, agent_context=context)
    nvext = with_headers(None, headers)
    named = routing_of(nvext, None if nvext is None else nvext.cache_salt)
    if named is None:
        return request
    changes = {name: value for name in named.__struct_fields__ if (value := getattr(named, name)) is not None}
    return msgspec.structs.replace(request, routing=msgspec.structs.replace(request.routing or Routing(), **changes))
