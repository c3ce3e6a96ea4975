"""Handshake: where the prefill and the decode of one request meet: SGLang's bootstrap server and a room in it. Pure.

router made the room   both legs carry it in `bootstrap_info` and run at once
prefill made the room  it says so at once, in `disaggregated_params`; the decode leg follows with them
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
class Meeting:
    """A room in the bootstrap server of a prefill worker."""

    host: str
    port: int
    room: int

    def words(self) -> dict[str, Any]:
        """As it is handed on, and as SGLang takes it."""
        return {HOST: self.host, PORT: self.port, ROOM: self.room}


def prefill_meeting(request: PreprocessedRequest, host: str, port: int) -> Meeting:
    """Where a prefill worker at that host and port waits for the decode side: the router's room, or a new one."""
    given = bootstrap_of(request)
    if given is not None:
        return Meeting(given.bootstrap_host, given.bootstrap_port, given.bootstrap_room)
    return Meeting(host, port, random.getrandbits(63))


def decode_meeting(request: PreprocessedRequest) -> Meeting:
    """Where a decode worker meets its prefill. Raises `InvalidArgument` for a request that has none.

    SGLang's decode side computes no prompt itself.
    """
    given = bootstrap_of(request)
    if given is not None:
        return Meeting(given.bootstrap_host, given.bootstrap_port, given.bootstrap_room)
    result = prefill_result_of(request)
    if result is None:
        raise InvalidArgument("SGLang's decode workers cannot compute a prompt themselves", param="prefill_result")
    return read_meeting(result.disaggregated_params)


def read_meeting(params: Any) -> Meeting:
    """What a prefill worker said. Raises `InvalidArgument` for what none of SGLang's did."""
    if isinstance(params, Mapping):
        host, port, room = params.get(HOST), params.get(PORT), params.get(ROOM)
        if isinstance(host, str) and isinstance(port, int) and isinstance(room, int):
            return Meeting(host, port, room)
    raise InvalidArgument(
        f"prefill_result: {str(params)[:80]!r}: expected {HOST}, {PORT} and {ROOM}", param="prefill_result"
    )
