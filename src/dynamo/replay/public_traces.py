"""Public traces: read requests recorded by other systems, in the formats in which they are published.

bailian     JSONL: {chat_id, parent_chat_id, timestamp in s, input_length, output_length, turn, hash_ids of 16 tokens}
weka        a session on each line, or in a file: {id, block_size, requests: [{t in s, type n or s, in, out, hash_ids, think_time},
            {type subagent, t, requests: […]}]}; hash ids are shared within a session only
baseten     Parquet or JSONL: timestamp_start_unix_ms, input_tokens, output_tokens, total_hashes, provided_session_id
burst_gpt   CSV: Timestamp in s, Request tokens, Response tokens; failed rows have no answer. Prompts have no common blocks.

Turns of a session arrive at their recorded times, or when the turn before is answered if that is later.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.core.errors import ConfigError
from dynamo.replay.convert import converted, csv_rows
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.trace import MooncakeRow, sessions_of
from dynamo.replay.trace_lines import BlockTokens, Delay, HashId, Tokens, decoded, from_zero, invalid_row, lines

BAILIAN_BLOCK = 16
DEFAULT_BLOCK = 512
"""Default of `--trace-block-size`, which formats with a block size of their own replace."""


class BailianRow(msgspec.Struct):
    """A request of a Bailian trace."""

    chat_id: int
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    parent_chat_id: int = -1
    turn: int = 1
    hash_ids: list[HashId] = []


class WekaRequest(msgspec.Struct, rename={"tokens": "in", "output": "out"}):
    """A request of a Weka session, or a subagent with requests of its own."""

    t: float
    type: str = "n"
    tokens: Tokens = 0
    output: Tokens = 0
    hash_ids: list[HashId] = []
    think_time: Delay | None = None
    requests: list["WekaRequest"] = []


class WekaSession(msgspec.Struct):
    """A session of a Weka trace."""

    id: str
    block_size: BlockTokens
    requests: list[WekaRequest]


class BasetenRow(msgspec.Struct):
    """A request of a Baseten trace."""

    timestamp_start_unix_ms: int
    input_tokens: Tokens
    output_tokens: Tokens
    total_hashes: list[HashId] | None = None
    provided_session_id: str | int | None = None
    poor_man_session_id: str | int | None = None


Sessions = tuple[list[ReplaySession], int]
"""Sessions and the tokens of a block of their hash ids."""


def read_public(paths: Sequence[str], trace_format: str, block_tokens: int = DEFAULT_BLOCK) -> Sessions:
    """Return the sessions of these files as one trace, whose times begin at 0. Raise `ConfigError` with the invalid line."""
    found, block = PUBLIC_FORMATS[trace_format](paths, block_tokens)
    return from_zero(paths, found), block


def bailian(paths: Sequence[str], block_tokens: int) -> Sessions:
    """Return chats, linked by their parents' ids."""
    block = BAILIAN_BLOCK if block_tokens == DEFAULT_BLOCK else block_tokens
    roots: dict[int, int] = {}
    chats: dict[int, list[BailianRow]] = {}
    decoder = msgspec.json.Decoder(BailianRow)
    for row in sorted(_decoded(lines(paths, "bailian"), decoder), key=lambda row: row.timestamp):
        root = roots.get(row.parent_chat_id, row.chat_id)
        roots[row.chat_id] = root
        chats.setdefault(root, []).append(row)
    found = [
        ReplaySession(
            f"{root}",
            [
                _turn(
                    f"{row.chat_id}", row.input_length, row.output_length, row.hash_ids, block,
                    1000 * row.timestamp,
                )
                for row in sorted(rows, key=lambda row: row.turn)
            ],
        )
        for root, rows in chats.items()
    ]  # fmt: skip
    return found, block


def weka(paths: Sequence[str], block_tokens: int) -> Sessions:
    """Return agents' sessions; the requests of a subagent are a session that begins at its own time."""
    decoder = msgspec.json.Decoder(WekaSession)
    found: list[ReplaySession] = []
    blocks: set[int] = set()
    for number, session in enumerate(_documents(paths, decoder)):
        blocks.add(session.block_size)
        scope = (number + 1) << 40
        main = [request for request in session.requests if request.type != "subagent"]
        found += _weka_turns(session.id, main, 0.0, scope, session.block_size, None)
        agents = [request for request in session.requests if request.type == "subagent"]
        for at, agent in enumerate(agents):
            is_relative = bool(agent.requests) and agent.requests[0].t < agent.t
            found += _weka_turns(
                f"{session.id}/{at}",
                agent.requests,
                agent.t if is_relative else 0.0,
                scope,
                session.block_size,
                session.id,
            )
    if len(blocks) > 1:
        raise ConfigError(f"--trace-format weka: block_size differs between sessions: {sorted(blocks)}")
    return found, next(iter(blocks), block_tokens)


def _weka_turns(
    name: str, requests: Sequence[WekaRequest], from_s: float, scope: int, block: int, parent: str | None
) -> Iterator[ReplaySession]:
    """Yield the session of a list of requests; nothing if it is empty."""
    turns = [
        replace(
            _turn(
                f"{name}.{at}", one.tokens, one.output, [scope + name_ for name_ in one.hash_ids], block,
                1000 * (from_s + one.t),
            ),
            delay_ms=1000 * (one.think_time or 0.0) if at else 0.0,
        )
        for at, one in enumerate(requests)
    ]  # fmt: skip
    if turns:
        yield ReplaySession(name, turns, parent)


def baseten(paths: Sequence[str], block_tokens: int) -> Sessions:
    """Return completions; rows of a session that the trace names are its turns."""
    rows: list[BasetenRow] = []
    for path in paths:
        if path.endswith(".parquet"):
            rows += _parquet(path)
        else:
            rows += _decoded(lines([path], "baseten"), msgspec.json.Decoder(BasetenRow))
    rows.sort(key=lambda row: row.timestamp_start_unix_ms)
    found: dict[str, list[Turn]] = {}
    for number, row in enumerate(rows):
        session = row.provided_session_id if row.provided_session_id is not None else row.poor_man_session_id
        name = f"r{number}" if session is None else f"{session}"
        at_ms = float(row.timestamp_start_unix_ms)
        made = _turn(f"r{number}", row.input_tokens, row.output_tokens, row.total_hashes or [], block_tokens, at_ms)
        found.setdefault(name, []).append(made)
    return [ReplaySession(name, turns) for name, turns in found.items()], block_tokens


def burst_gpt(paths: Sequence[str], block_tokens: int) -> Sessions:
    """Return requests, each a session of its own."""
    rows = converted(csv_rows(paths, "burst_gpt"), "burstgpt", block_tokens)
    made = ((f"row {at}", msgspec.convert(row, MooncakeRow)) for at, row in enumerate(rows))
    return sessions_of(made, is_delta=False, block_tokens=block_tokens), block_tokens


PUBLIC_FORMATS: dict[str, Callable[[Sequence[str], int], Sessions]] = {
    "bailian": bailian,
    "weka": weka,
    "baseten": baseten,
    "burst_gpt": burst_gpt,
}


def _turn(name: str, tokens: int, output: int, hash_ids: Sequence[int], block: int, at_ms: float) -> Turn:
    """Return a turn; blocks without a name are unique."""
    tokens, needed = max(1, tokens), -(-max(1, tokens) // block)
    ids = tuple(hash_ids[:needed])
    unique = (-(xxh3_64_intdigest(f"{name}/{at}".encode()) >> 2) - 1 for at in range(needed - len(ids)))
    return Turn(name, tokens, max(1, output), (*ids, *unique), at_ms)


def _decoded(found: Iterable[tuple[str, bytes]], decoder: "msgspec.json.Decoder[Any]") -> Iterator[Any]:
    """Decode lines without their locations. Raise `ConfigError` with the invalid line."""
    return (row for _, row in decoded(found, decoder))


def _documents(paths: Sequence[str], decoder: "msgspec.json.Decoder[WekaSession]") -> Iterator[WekaSession]:
    """Yield the sessions of files with one on each line, or with one formatted over several lines."""
    for path in paths:
        found = list(lines([path], "weka"))
        if len(found) > 1 and not found[0][1].rstrip().endswith(b"}"):
            found = [(path, b"".join(line for _, line in found))]
        yield from _decoded(found, decoder)


def _parquet(path: str) -> list[BasetenRow]:
    """Read a Parquet file. Raise `ConfigError` if pyarrow is not installed, or a column is missing."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{path}: reading Parquet requires the package pyarrow; or export the file to JSONL"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    found: list[BasetenRow] = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(msgspec.convert(row, BasetenRow))
        except msgspec.ValidationError as error:
            raise invalid_row(f"{path}: row {number}", row, error) from None
    return found
