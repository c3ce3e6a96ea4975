"""Handshake: rendezvous of the prefill and decode phases of a request at SGLang's bootstrap server. Pure.

room from the router          both requests carry it in `bootstrap_info` and run concurrently
room from the prefill worker  returned at once in `disaggregated_params`; the decode request follows with it
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.backend.disagg import bootstrap_of, prefill_result_of
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest

HOST, PORT, ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"


@dataclass(frozen=True, slots=True)
class SglangBootstrap:
    """A bootstrap room of a prefill worker."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, Any]:
        """Return the fields in SGLang's format, as they are sent to the decode worker."""
        return {HOST: self.host, PORT: self.port, ROOM: self.room}


def prefill_bootstrap(request: PreprocessedRequest, host: str, port: int) -> SglangBootstrap:
    """Return the room at which a prefill worker waits for decode: the router's room, or a new one."""
    given = bootstrap_of(request)
    if given is not None:
        return SglangBootstrap(given.bootstrap_host, given.bootstrap_port, given.bootstrap_room)
    return SglangBootstrap(host, port, random.getrandbits(63))


def decode_bootstrap(request: PreprocessedRequest) -> SglangBootstrap:
    """Return the room of a decode request's prefill. Raise `InvalidArgument` for a request without one.

    SGLang's decode workers cannot compute prompts.
    """
    given = bootstrap_of(request)
    if given is not None:
        return SglangBootstrap(given.bootstrap_host, given.bootstrap_port, given.bootstrap_room)
    result = prefill_result_of(request)
    if result is None:
        raise InvalidArgument("SGLang's decode workers cannot compute a prompt themselves", param="prefill_result")
    return parse_bootstrap(result.disaggregated_params)


def parse_bootstrap(params: Any) -> SglangBootstrap:
    """Return the room in a prefill result. Raise `InvalidArgument` for a result not from an SGLang prefill worker."""
    if isinstance(params, Mapping):
        host, port, room = params.get(HOST), params.get(PORT), params.get(ROOM)
        if isinstance(host, str) and isinstance(port, int) and isinstance(room, int):
            return SglangBootstrap(host, port, room)
    raise InvalidArgument(
        f"prefill_result: {str(params)[:80]!r}: expected {HOST}, {PORT} and {ROOM}", param="prefill_result"
    )
