"""Trace: read recorded requests from files.

mooncake         {timestamp, input_length, output_length, hash_ids, session_id?, delay?, priority?, …}
mooncake-delta   the same, but each row of a session contains only the addition to the previous turn's prompt
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.trace_lines import Delay, HashId, PromptTokens, Tokens, decoded, from_zero, lines

FORMATS = ("mooncake", "mooncake-delta")


class MooncakeRow(msgspec.Struct):
    """One line of a trace."""

    input_length: PromptTokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[HashId] | None = None
    timestamp: float | None = None
    created_time: float | None = None
    input_tokens: PromptTokens | None = None
    output_tokens: Tokens | None = None
    request_id: str | None = None
    session_id: str | int | None = None
    delay: Delay | None = None
    delay_ms: Delay | None = None
    priority: float = 0.0
    strict_priority: int = 0


def read(paths: Sequence[str], trace_format: str = "mooncake", block_tokens: int = 512) -> list[ReplaySession]:
    """Return the sessions of these files as one trace, whose times begin at 0. Raise `ConfigError` with the invalid line."""
    if trace_format not in FORMATS:
        raise ConfigError(f"--trace-format {trace_format}: expected one of {', '.join(FORMATS)}")
    found = rows(lines(paths, trace_format))
    return from_zero(paths, sessions_of(found, is_delta=trace_format == "mooncake-delta", block_tokens=block_tokens))


def rows(found: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, MooncakeRow]]:
    """Decode lines. Raise `ConfigError` with the invalid line."""
    return decoded(found, msgspec.json.Decoder(MooncakeRow))


def sessions_of(found: Iterable[tuple[str, MooncakeRow]], *, is_delta: bool, block_tokens: int) -> list[ReplaySession]:
    """Group rows by session id into turns; a row without one is a session of its own."""
    turns: dict[Any, list[Turn]] = {}
    for number, (place, row) in enumerate(found):
        name = f"r{number}" if row.session_id is None else row.session_id
        before = turns.setdefault(name, [])
        turn = _turn(place, number, row, before[-1] if before and is_delta else None, block_tokens)
        if before and turn.at_ms is not None and turn.at_ms < (before[-1].at_ms or turn.at_ms):
            raise ConfigError(
                f"{place}: timestamp is {turn.at_ms:g}: must be {before[-1].at_ms:g} or more, "
                f"the time of the previous turn of session {name}"
            )
        before.append(turn)
    return [ReplaySession(str(name), of) for name, of in turns.items()]


def _turn(place: str, number: int, row: MooncakeRow, before: Turn | None, block_tokens: int) -> Turn:
    given = row.input_length if row.input_length is not None else row.input_tokens
    output = row.output_length if row.output_length is not None else row.output_tokens
    if given is None or output is None:
        raise ConfigError(
            f"{place}: {'input_length' if given is None else 'output_length'} is missing: must be an integer"
        )
    ids: Sequence[int] = row.hash_ids or ()
    if before is not None:  # Keep the complete blocks of the previous prompt; its answer is part of the new blocks.
        kept = before.input_tokens // block_tokens
        ids = (*before.hash_ids[:kept], *ids)
        given += before.input_tokens
    needed = -(-given // block_tokens)
    if len(ids) < needed:  # Blocks without a name are unique.
        ids = (*ids, *(-(number << 20) - at - 1 for at in range(needed - len(ids))))
    at_ms = row.timestamp if row.timestamp is not None else row.created_time
    return Turn(
        row.request_id or f"r{number}",
        given,
        max(1, output),
        tuple(ids),
        at_ms,
        row.delay_ms if row.delay_ms is not None else row.delay or 0.0,
        row.priority,
        row.strict_priority,
    )
