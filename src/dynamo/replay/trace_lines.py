"""Trace lines: read and decode the lines of trace files; errors name file, line, field, value and what is allowed."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn

LENGTH_MAX = 100_000_000  # Tokens of a prompt or an answer; a larger number is a mistake of the trace.
LINE_BYTES_MAX = 64 << 20  # Bytes of a line: a session of some 100,000 requests.
SPAN_MAX_MS = 366 * 86_400_000.0  # Longest trace; a longer one has timestamps in another unit.
SHOWN_MAX = 60  # Characters of an invalid value in an error.
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]
HashId = Annotated[int, msgspec.Meta(ge=0)]
Delay = Annotated[float, msgspec.Meta(ge=0)]
"""A time between two requests."""

SIGNS: tuple[tuple[str, frozenset[str]], ...] = (
    ("bailian", frozenset({"chat_id", "parent_chat_id"})),
    ("baseten", frozenset({"timestamp_start_unix_ms"})),
    ("weka", frozenset({"block_size", "requests"})),
    ("agentic-mooncake", frozenset({"schema", "version", "block_size"})),
    ("applied-compute-agentic", frozenset({"num_turns", "tool_call_latency"})),
    ("dynamo", frozenset({"timestamp", "event"})),
    ("dynamo", frozenset({"event_type", "schema"})),
    ("mooncake", frozenset({"input_length", "output_length"})),
)
"""Fields by which the first line of a file shows its format; the first match applies."""
CSV_SIGN = b"Timestamp,Model,Request tokens"
TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
EXPECTED = re.compile(r"Expected `([^`]+)`(?: (>=|<=) ([\d.e+]+))?")
MISSING = re.compile(r"missing required field `([^`]+)`")
PATH = re.compile(r" - at `\$\.?(.*)`$")


def lines(paths: Sequence[str], trace_format: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield each line that is not blank with its location.

    Compressed files are decompressed, up to the end of one that is still being written; a byte order mark is removed.
    Raise `ConfigError` if a file cannot be read, a line is too long, or the first one has the form of another format.
    """
    for path in paths:
        is_first = True
        try:
            with _opened(path) as file:
                number = 0
                while line := file.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if len(line) > LINE_BYTES_MAX:
                        raise ConfigError(
                            f"{path}:{number}: the line is too long: must be at most {LINE_BYTES_MAX:,} bytes"
                        )
                    if number == 1:
                        line = line.removeprefix(BYTE_ORDER_MARK)
                    if not line.strip():
                        continue
                    if is_first and trace_format is not None:
                        _check_format(f"{path}:{number}", line, trace_format)
                    is_first = False
                    yield f"{path}:{number}", line
        except EOFError:
            continue  # The compressed stream has no end yet.
        except zlib.error as error:
            raise ConfigError(f"cannot decompress the trace {path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open a file, compressed or not: the first bytes decide, not the name."""
    with Path(path).open("rb") as stored:
        if stored.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=stored) as file:
                yield cast("BinaryIO", file)
        else:
            yield stored


def _check_format(place: str, line: bytes, trace_format: str) -> None:
    """Raise `ConfigError` if a line has the form of another format."""
    found = format_of(line)
    if found is not None and found != trace_format and not (found == "mooncake" and trace_format == "mooncake-delta"):
        raise ConfigError(f"{place}: the line has the form of --trace-format {found}, not {trace_format}")


def format_of(line: bytes) -> str | None:
    """Return the format that a line of a trace has; None if it is not clear."""
    if line.startswith(CSV_SIGN):
        return "burst_gpt"
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return next((name for name, sign in SIGNS if isinstance(row, dict) and sign <= row.keys()), None)


def decoded(found: Iterable[tuple[str, bytes]], decoder: "msgspec.json.Decoder[Any]") -> Iterator[tuple[str, Any]]:
    """Decode lines. Raise `ConfigError` for the first invalid one."""
    for place, line in found:
        try:
            yield place, decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid_line(place, line, error) from None


def invalid_line(place: str, line: bytes, error: Exception) -> ConfigError:
    """Return the error of a line that `msgspec` refused."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as malformed:
        shown = _shown(line.decode("utf-8", "replace").rstrip("\r\n"))
        return ConfigError(f"{place}: {shown}: must be a JSON object: {malformed}")
    return invalid_row(place, row, error)


def invalid_row(place: str, row: Any, error: Exception) -> ConfigError:
    """Return the error of a decoded row that `msgspec` refused."""
    text = str(error)
    at = PATH.search(text)
    path = at[1] if at else ""
    if missing := MISSING.search(text):
        known = sorted(_at(row, path) or {})
        names = ", ".join(known) if known else "no field"
        return ConfigError(
            f"{place}: {_joined(path, missing[1])} is missing: the row has {_shown(names, quoted=False)}"
        )
    expected = EXPECTED.search(text)
    allowed = PATH.sub("", text) if expected is None else _allowed(*expected.groups())
    shown = _shown(msgspec.json.encode(_at(row, path)).decode())
    return ConfigError(f"{place}: {f'{path} is {shown}' if path else shown}: must be {allowed}")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _allowed(types: str, operator: str | None, bound: str | None) -> str:
    """Return the accepted values in words."""
    names = " or ".join(TYPES.get(one, one) for one in types.split(" | "))
    if operator is None:
        return names
    number = (bound or "").removesuffix(".0")
    return f"{names}, {number} or more" if operator == ">=" else f"{names}, at most {number}"


def _at(row: Any, path: str) -> Any:
    """Return the value at a path such as `requests[2].in`; the closest one above if a part of it is unknown."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            row = row[int(index)] if index else row[name]
        except (KeyError, IndexError, TypeError):
            return row
    return row


def _shown(text: str, *, quoted: bool = True) -> str:
    """Return a text that fits a line."""
    short = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    return short.encode("unicode_escape").decode() if quoted else short


def from_zero(paths: Sequence[str], sessions: Sequence[ReplaySession]) -> list[ReplaySession]:
    """Return the sessions with times that begin at 0, as upstream. Raise `ConfigError` if there are none."""
    times = [turn.at_ms for session in sessions for turn in session.turns if turn.at_ms is not None]
    if not sessions:
        raise ConfigError(f"{', '.join(paths)}: the trace has no requests")
    first_ms = min(times, default=0.0)
    if max(times, default=0.0) - first_ms > SPAN_MAX_MS:
        last = max((turn for one in sessions for turn in one.turns), key=lambda turn: turn.at_ms or 0.0)
        raise ConfigError(
            f"{', '.join(paths)}: request {last.request_id} arrives {(last.at_ms or 0.0) - first_ms:g} ms after the first: "
            "must be at most 366 days; check the unit of the timestamps"
        )
    if not first_ms:
        return list(sessions)
    return [replace(session, turns=[_earlier(turn, first_ms) for turn in session.turns]) for session in sessions]


def _earlier(turn: Turn, by_ms: float) -> Turn:
    return turn if turn.at_ms is None else replace(turn, at_ms=turn.at_ms - by_ms)
