"""Request trace: read and write a frontend's request trace (`DYN_REQUEST_TRACE`, docs/observability.md) for replay.

Only rows of ended requests that describe their prompts are read. Rows of agents' sessions become the turns of sessions;
a trace may not mix such rows with others, because the two kinds define arrival times differently.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.names import Namer
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.trace_lines import invalid_line
from dynamo.serving.request_trace.rows import SCHEMA, AgentContext, Replay, RequestEnd, TraceRow, Worker


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a frontend's trace file; other sinks write the row alone."""

    timestamp: int
    """Milliseconds from the start of the trace to the creation of the row."""
    event: TraceRow


ROW, LINE = msgspec.json.Decoder(TraceRow), msgspec.json.Decoder(Line)


def sessions_of(lines: Iterable[tuple[str, bytes]]) -> tuple[list[ReplaySession], int]:
    """Return the sessions and the tokens per hash id. Raise `ConfigError` with the invalid line."""
    turns: dict[str, list[Turn]] = {}
    kinds: set[bool] = set()
    block_tokens = 0
    began: int | None = None
    for place, line in lines:
        row = row_of(place, line)
        end = row.request
        if row.event_type != "request_end" or end is None or end.replay is None or end.output_tokens < 1:
            continue
        if block_tokens not in {0, end.replay.trace_block_size}:
            raise ConfigError(
                f"{place}: trace_block_size {end.replay.trace_block_size} differs from {block_tokens} of earlier rows"
            )
        block_tokens = end.replay.trace_block_size
        kinds.add(row.agent_context is None)
        if len(kinds) > 1:
            raise ConfigError(f"{place}: rows with and without a session cannot be mixed")
        began = end.request_received_ms if began is None else min(began, end.request_received_ms)
        name = end.request_id if row.agent_context is None else row.agent_context.session_id
        turns.setdefault(name, []).append(_turn(end, end.replay, len(turns)))
    if not turns or began is None:
        raise ConfigError("the request trace has no requests that can be replayed")
    return [ReplaySession(name, _from_start(of, began)) for name, of in turns.items()], block_tokens


def row_of(place: str, line: bytes) -> TraceRow:
    """Decode a line. Raise `ConfigError` with its place for one that is no row of a trace."""
    try:
        row = ROW.decode(line)
    except msgspec.DecodeError:
        try:
            row = LINE.decode(line).event
        except msgspec.DecodeError as error:
            raise invalid_line(place, line, error) from None
    if row.schema not in {None, SCHEMA}:
        raise ConfigError(f"{place}: schema {row.schema}: expected {SCHEMA}")
    return row


def _turn(end: RequestEnd, replay: Replay, number: int) -> Turn:
    ids: Sequence[int] = replay.input_sequence_hashes
    missing = -(-replay.input_length // replay.trace_block_size) - len(ids)
    if missing > 0:  # The incomplete block at the end of a prompt is unique.
        ids = (*ids, *(-(number << 20) - end.request_received_ms - at - 1 for at in range(missing)))
    return Turn(
        end.request_id, max(1, replay.input_length), end.output_tokens, tuple(ids), float(end.request_received_ms)
    )


def _from_start(turns: list[Turn], began: int) -> list[Turn]:
    """Sort turns by time, relative to the first request of all."""
    ordered = sorted(turns, key=lambda turn: turn.at_ms or 0.0)
    return [
        Turn(turn.request_id, turn.input_tokens, turn.output_tokens, turn.hash_ids, (turn.at_ms or 0.0) - began)
        for turn in ordered
    ]


def rows_of(outcome: RunOutcome, trace_block_tokens: int, block_tokens: int, began_ms: int = 0) -> Iterator[Line]:
    """Yield the answered requests as a frontend with such block sizes would have traced them.

    Rows have agents' sessions if any session has several turns. `began_ms`: start of the run in ms since 1970.
    """
    namer = Namer(trace_block_tokens, block_tokens)
    has_sessions = any(len(flight.session.turns) > 1 or flight.session.parent_id for flight in outcome.flights)
    for flight in sorted(outcome.flights, key=lambda flight: flight.finished_ms):
        if flight.finished_ms < 0:
            continue
        turn, session = flight.turn, flight.session
        hashes = namer.names(turn.hash_ids, turn.input_tokens).sequence_hashes
        prefill_worker = flight.prefill_slot if flight.is_transferred else flight.slot
        end = RequestEnd(
            request_id=turn.request_id,
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            cached_tokens=flight.cached_tokens,
            request_received_ms=began_ms + round(flight.arrived_ms),
            prefill_wait_time_ms=flight.waited_ms,
            prefill_time_ms=flight.first_ms - flight.placed_ms,
            ttft_ms=flight.first_ms - flight.arrived_ms,
            total_time_ms=flight.finished_ms - flight.arrived_ms,
            avg_itl_ms=(flight.finished_ms - flight.first_ms) / max(1, turn.output_tokens - 1),
            worker=Worker(prefill_worker, flight.slot),
            replay=Replay(block_tokens, turn.input_tokens, hashes),
        )
        context = AgentContext(session_id=session.session_id, parent_session_id=session.parent_id)
        row = TraceRow(
            schema=SCHEMA,
            event_type="request_end",
            event_time_unix_ms=began_ms + round(flight.finished_ms),
            event_source="dynamo" if has_sessions else None,
            agent_context=context if has_sessions else None,
            request=end,
        )
        yield Line(round(flight.finished_ms), row)
