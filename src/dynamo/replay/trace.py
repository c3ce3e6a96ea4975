"""Trace: read recorded requests from files.

mooncake         {timestamp, input_length, output_length, hash_ids, session_id?, delay?, priority?, …}
mooncake-delta   the same, but each row of a session contains only the addition to the previous turn's prompt
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn

FORMATS = ("mooncake", "mooncake-delta")


class MooncakeRow(msgspec.Struct):
    """One line of a trace."""

    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    created_time: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    request_id: str | None = None
    session_id: str | int | None = None
    delay: float | None = None
    delay_ms: float | None = None
    priority: float = 0.0
    strict_priority: int = 0


def lines(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each line with its location; .gz files are decompressed, up to the end of one that is still being written.

    Raise `ConfigError` if a file cannot be read.
    """
    for path in paths:
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line
        except EOFError:
            continue  # The compressed stream has no end yet.
        except OSError as error:
            raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None


def read(paths: Sequence[str], trace_format: str = "mooncake", block_tokens: int = 512) -> list[ReplaySession]:
    """Return the sessions of these files as one trace."""
    if trace_format not in FORMATS:
        raise ConfigError(f"--trace-format {trace_format}: expected one of {', '.join(FORMATS)}")
    return sessions_of(rows(lines(paths)), is_delta=trace_format == "mooncake-delta", block_tokens=block_tokens)


def rows(found: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, MooncakeRow]]:
    """Decode lines. Raise `ConfigError` with the invalid line."""
    decoder = msgspec.json.Decoder(MooncakeRow)
    for place, line in found:
        try:
            yield place, decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{place}: {error}") from None


def sessions_of(found: Iterable[tuple[str, MooncakeRow]], *, is_delta: bool, block_tokens: int) -> list[ReplaySession]:
    """Group rows by session id into turns; a row without one is a session of its own."""
    turns: dict[Any, list[Turn]] = {}
    for number, (place, row) in enumerate(found):
        name = f"r{number}" if row.session_id is None else row.session_id
        before = turns.setdefault(name, [])
        turns[name].append(_turn(place, number, row, before[-1] if before and is_delta else None, block_tokens))
    return [ReplaySession(str(name), of) for name, of in turns.items()]


def _turn(place: str, number: int, row: MooncakeRow, before: Turn | None, block_tokens: int) -> Turn:
    given = row.input_length if row.input_length is not None else row.input_tokens
    output = row.output_length if row.output_length is not None else row.output_tokens
    if given is None or output is None:
        raise ConfigError(f"{place}: expected input_length and output_length")
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
        max(1, given),
        max(1, output),
        tuple(ids),
        at_ms,
        row.delay_ms if row.delay_ms is not None else row.delay or 0.0,
        row.priority,
        row.strict_priority,
    )
