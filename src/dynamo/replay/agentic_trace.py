"""Agentic traces: read plays from files.

agentic-mooncake          a header {schema: dynamo.agentic_mooncake, version: 2, block_size, hash_id_scope}, then requests:
                          {request_id, play_id, session_id, input_length, output_length, hash_ids, not_before_ms,
                          dependencies: [{request_id, trigger, delay_ms, relation}]}
applied-compute-agentic   a trajectory on each line: {num_turns, input_prompt_length, assistant_response_length[],
                          tool_call_output_length[], tool_call_latency[] in seconds, final_assistant_response_length}
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.replay.agentic import Need, Play
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.trace_lines import BlockTokens, Delay, HashId, Tokens, invalid_line

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2


class AgenticTraceHeader(msgspec.Struct):
    """The first line of an agentic-mooncake trace."""

    schema: str
    version: int
    block_size: BlockTokens
    hash_id_scope: Literal["local", "global"] = "local"
    """local: hash ids are shared within a play only; global: across all plays."""


class Dependency(msgspec.Struct):
    """A dependency of a request."""

    request_id: str
    trigger: Literal["complete", "dispatch"] = "complete"
    delay_ms: Delay = 0.0
    relation: str | None = None


class AgenticTraceRequest(msgspec.Struct):
    """A request line."""

    request_id: str
    play_id: str
    session_id: str
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[HashId] = []
    not_before_ms: float | None = None
    dependencies: list[Dependency] = []
    model: str | None = None


class Trajectory(msgspec.Struct):
    """A trajectory line."""

    num_turns: Tokens
    input_prompt_length: Tokens
    assistant_response_length: list[Tokens]
    tool_call_output_length: list[Tokens]
    tool_call_latency: list[Delay]
    final_assistant_response_length: Tokens


def plays_of(lines: Iterable[tuple[str, bytes]]) -> tuple[list[Play], int]:
    """Return the plays and the tokens per hash id. Raise `ConfigError` with the invalid line."""
    header: AgenticTraceHeader | None = None
    decoder = msgspec.json.Decoder(AgenticTraceRequest)
    requests: dict[str, list[AgenticTraceRequest]] = {}
    for place, line in lines:
        try:
            if header is None:
                header = msgspec.json.decode(line, type=AgenticTraceHeader)
                if (header.schema, header.version) != (SCHEMA, VERSION):
                    raise ConfigError(
                        f"{place}: {header.schema} version {header.version}: expected {SCHEMA} version {VERSION}"
                    )
                continue
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise invalid_line(place, line, error) from None
        requests.setdefault(request.play_id, []).append(request)
    if header is None:
        raise ConfigError("the agentic trace is empty")
    names = Renamed(header)
    return [_play(play_id, of, names) for play_id, of in requests.items()], header.block_size


class Renamed:
    """Hash ids made unique in the whole trace: equal local ids of different plays get different names."""

    def __init__(self, header: AgenticTraceHeader) -> None:
        self._is_local = header.hash_id_scope == "local"
        self._block_tokens = header.block_size
        self._known: dict[tuple[str, int], int] = {}
        self._fresh = 0

    def ids(self, request: AgenticTraceRequest) -> tuple[int, ...]:
        """Return the ids of a prompt, with new ids for blocks without one."""
        scope = request.play_id if self._is_local else ""
        found = [self._name((scope, given)) for given in request.hash_ids]
        while len(found) * self._block_tokens < request.input_length:
            found.append(self._next())
        return tuple(found)

    def _name(self, key: tuple[str, int]) -> int:
        if key not in self._known:
            self._known[key] = self._next()
        return self._known[key]

    def _next(self) -> int:
        self._fresh += 1
        return self._fresh


def _play(play_id: str, requests: list[AgenticTraceRequest], names: Renamed) -> Play:
    turns: dict[str, list[Turn]] = {}
    parents: dict[str, str] = {}
    home = {request.request_id: request.session_id for request in requests}
    for request in requests:
        turn = Turn(
            request.request_id,
            max(1, request.input_length),
            max(1, request.output_length),
            names.ids(request),
            request.not_before_ms,
        )
        turns.setdefault(request.session_id, []).append(turn)
        for needed in request.dependencies:
            if needed.relation == "spawn" and needed.request_id in home:
                parents.setdefault(request.session_id, home[needed.request_id])
    needs = {
        request.request_id: [Need(one.request_id, one.trigger, one.delay_ms) for one in request.dependencies]
        for request in requests
    }
    sessions = [
        ReplaySession(f"{play_id}/{name}", of, f"{play_id}/{parents[name]}" if name in parents else None)
        for name, of in turns.items()
    ]
    return Play(play_id, sessions, needs).check()


def trajectories_of(lines: Iterable[tuple[str, bytes]], block_tokens: int) -> list[Play]:
    """Return the plays of trajectories: single agents whose turns wait for their tools."""
    decoder = msgspec.json.Decoder(Trajectory)
    found: list[Play] = []
    fresh = 0
    for number, (place, line) in enumerate(lines):
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise invalid_line(place, line, error) from None
        answers = [*row.assistant_response_length, row.final_assistant_response_length]
        tools, waits = row.tool_call_output_length, row.tool_call_latency
        if not len(answers) - 1 == len(tools) == len(waits) == row.num_turns:
            raise ConfigError(f"{place}: expected {row.num_turns} answers, tool outputs and tool latencies")
        turns, needs = list[Turn](), dict[str, list[Need]]()
        tokens, ids = row.input_prompt_length, list[int]()
        for at, answer in enumerate(answers):
            if at:
                tokens += answers[at - 1] + tools[at - 1]
                needs[f"t{number}.{at}"] = [Need(f"t{number}.{at - 1}", "complete", waits[at - 1] * 1000)]
            missing = max(0, -(-tokens // block_tokens) - len(ids))
            ids += range(fresh, fresh + missing)
            fresh += missing
            turns.append(Turn(f"t{number}.{at}", max(1, tokens), max(1, answer), tuple(ids)))
        found.append(Play(f"t{number}", [ReplaySession(f"t{number}", turns)], needs).check())
    return found
