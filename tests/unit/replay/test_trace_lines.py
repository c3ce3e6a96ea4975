"""Trace lines: invalid files in each format give one line with file, line, field, value and what is allowed."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.replay import trace_lines
from dynamo.replay.config import ReplayConfig
from dynamo.replay.load import ReplaySession
from dynamo.replay.trace_lines import format_of, lines

ROWS: dict[str, dict[str, Any]] = {
    "mooncake": {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    "mooncake-delta": {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    "bailian": {
        "chat_id": 7, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 40, "output_length": 9, "turn": 1,
        "hash_ids": [1, 2, 3],
    },
    "weka": {
        "id": "s", "block_size": 64,
        "requests": [{"t": 1.0, "type": "n", "in": 130, "out": 20, "hash_ids": [1, 2], "think_time": 0.5}],
    },
    "baseten": {
        "timestamp_start_unix_ms": 1_700_000_002_000, "input_tokens": 100, "output_tokens": 7, "total_hashes": [1, 2],
    },
}  # fmt: skip
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
CELLS = {"Timestamp": "5", "Model": "ChatGPT", "Request tokens": "472", "Response tokens": "18"}
FORMATS = [*ROWS, "burst_gpt"]


def load(path: Path, trace_format: str) -> list[ReplaySession]:
    return list(ReplayConfig(trace=str(path), trace_format=trace_format, progress=False).source().sessions)


def refused(path: Path, data: bytes, trace_format: str) -> str:
    """Return the only line of the error of a file."""
    path.write_bytes(data)
    with pytest.raises(ConfigError) as found:
        load(path, trace_format)
    return checked(path, found.value)


def checked(path: Path, error: ConfigError) -> str:
    """Return the text of an error, which names the file in one line."""
    text = str(error)
    assert len(text.splitlines()) == 1, text
    assert len(text) < 500
    assert str(path) in text
    return text


def encoded(trace_format: str) -> bytes:
    """Return a valid file."""
    if trace_format == "burst_gpt":
        return (HEADER + ",".join(CELLS.values()) + "\n").encode()
    return json.dumps(ROWS[trace_format]).encode() + b"\n"


@pytest.mark.parametrize("trace_format", FORMATS)
def test_valid_file_is_read_plain_compressed_and_with_a_byte_order_mark(tmp_path: Path, trace_format: str) -> None:
    data = encoded(trace_format)
    for number, stored in enumerate((data, gzip.compress(data), b"\xef\xbb\xbf" + data, b"\r\n" + data)):
        path = tmp_path / f"t{number}"
        path.write_bytes(stored)
        (session,) = load(path, trace_format)
        assert session.turns[0].at_ms == 0


MISTAKES = [
    ("mooncake", "input_length", -3, "input_length is -3: must be an integer, 1 or more"),
    ("mooncake", "input_length", 0, "input_length is 0: must be an integer, 1 or more"),
    ("mooncake", "output_length", "five", 'output_length is "five": must be an integer or null'),
    ("mooncake", "output_length", 10**9, "output_length is 1000000000: must be an integer, at most 100000000"),
    ("mooncake", "hash_ids", [0, -1], "hash_ids[1] is -1: must be an integer, 0 or more"),
    ("mooncake", "hash_ids", 7, "hash_ids is 7: must be a list or null"),
    ("mooncake", "timestamp", "soon", 'timestamp is "soon": must be a number or null'),
    ("mooncake", "delay", -1, "delay is -1: must be a number, 0 or more"),
    ("bailian", "input_length", -3, "input_length is -3: must be an integer, 0 or more"),
    ("bailian", "timestamp", None, "timestamp is null: must be a number"),
    ("weka", "block_size", 0, "block_size is 0: must be an integer, 1 or more"),
    ("weka", "requests", [{"t": 1.0, "in": -1}], "requests[0].in is -1: must be an integer, 0 or more"),
    ("weka", "requests", [{"t": 1.0, "think_time": -1}], "requests[0].think_time is -1: must be a number, 0 or more"),
    ("weka", "requests", [{"in": 1}], "requests[0].t is missing: the row has in"),
    ("baseten", "output_tokens", -1, "output_tokens is -1: must be an integer, 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("trace_format", "field", "value", "text"), MISTAKES)
def test_invalid_value_is_named_with_file_line_field_and_what_is_allowed(
    tmp_path: Path, trace_format: str, field: str, value: object, text: str
) -> None:
    path = tmp_path / "t.jsonl"
    data = encoded(trace_format) + json.dumps(ROWS[trace_format] | {field: value}).encode()
    assert refused(path, data, trace_format) == f"{path}:2: {text}"


REQUIRED = [
    *(("mooncake", name) for name in ("input_length", "output_length")),
    *(("bailian", name) for name in ("chat_id", "timestamp", "input_length", "output_length")),
    *(("weka", name) for name in ("id", "block_size", "requests")),
    *(("baseten", name) for name in ("timestamp_start_unix_ms", "input_tokens", "output_tokens")),
]


@pytest.mark.parametrize(("trace_format", "field"), REQUIRED)
def test_missing_field_is_named(tmp_path: Path, trace_format: str, field: str) -> None:
    row = {name: value for name, value in ROWS[trace_format].items() if name != field}
    data = encoded(trace_format) + json.dumps(row).encode()
    assert f":2: {field} is missing: " in refused(tmp_path / "t.jsonl", data, trace_format)


@pytest.mark.parametrize(
    ("column", "value"), [("Request tokens", "-1"), ("Response tokens", "x"), ("Timestamp", "nan")]
)
def test_invalid_cell_is_named(tmp_path: Path, column: str, value: str) -> None:
    data = HEADER + "".join(",".join(cells.values()) + "\n" for cells in (CELLS, CELLS | {column: value}))
    text = refused(tmp_path / "b.csv", data.encode(), "burst_gpt")
    assert f":3: {column} is '{value}': must be " in text


@pytest.mark.parametrize("trace_format", FORMATS)
@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_file_without_requests_is_refused(tmp_path: Path, trace_format: str, data: bytes) -> None:
    assert "has no requests" in refused(tmp_path / "t.jsonl", data, trace_format)


@pytest.mark.parametrize("trace_format", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_file_of_another_format_is_recognized(tmp_path: Path, trace_format: str, other: str) -> None:
    data, is_same = encoded(other), {trace_format, other} <= {"mooncake", "mooncake-delta"}
    if trace_format == other or is_same:
        assert format_of(data) in {trace_format, "mooncake"}
        return
    named = "mooncake" if other == "mooncake-delta" else other
    path = tmp_path / "t"
    text = refused(path, data, trace_format)
    assert text == f"{path}:1: the line has the form of --trace-format {named}, not {trace_format}"


@pytest.mark.parametrize("trace_format", FORMATS)
def test_damaged_gzip_file_is_refused(tmp_path: Path, trace_format: str) -> None:
    data = bytearray(gzip.compress(encoded(trace_format) * 200))
    data[len(data) // 2] ^= 0xFF
    refused(tmp_path / "t.gz", bytes(data), trace_format)


@pytest.mark.parametrize("trace_format", FORMATS)
def test_line_longer_than_the_limit_is_refused(
    tmp_path: Path, trace_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_lines, "LINE_BYTES_MAX", 1000)
    text = refused(tmp_path / "t", encoded(trace_format) + b"x" * 1001, trace_format)
    assert "the line is too long: must be at most 1,000 bytes" in text


def test_line_of_the_maximum_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_lines, "LINE_BYTES_MAX", 10)
    path = tmp_path / "t"
    path.write_bytes(b"123456789\n12345")
    assert [line for _, line in lines([str(path)])] == [b"123456789\n", b"12345"]


@pytest.mark.parametrize("trace_format", ["mooncake", "bailian"])
def test_trace_with_timestamps_in_another_unit_is_refused(tmp_path: Path, trace_format: str) -> None:
    late = ROWS[trace_format] | {"timestamp": 1.7e18, "chat_id": 9}
    text = refused(tmp_path / "t", encoded(trace_format) + json.dumps(late).encode(), trace_format)
    assert "must be at most 366 days; check the unit of the timestamps" in text


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), trace_format=st.sampled_from(FORMATS))
def test_any_row_is_either_read_with_valid_times_and_lengths_or_refused_in_one_line(
    tmp_path: Path, data: st.DataObject, trace_format: str
) -> None:
    path = tmp_path / "t"
    if trace_format == "burst_gpt":
        cells = {name: data.draw(st.text(max_size=12) | st.just(value)) for name, value in CELLS.items()}
        text = HEADER + ",".join(CELLS.values()) + "\n" + ",".join(cells.values())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        row = dict(ROWS[trace_format])
        for name in data.draw(st.sets(st.sampled_from([*row, "session_id", "delay", "turn"]), max_size=3)):
            row[name] = data.draw(ANY)
        path.write_bytes(encoded(trace_format) + json.dumps(row).encode())
    try:
        found = load(path, trace_format)
    except ConfigError as error:
        checked(path, error)
        return
    turns = [turn for session in found for turn in session.turns]
    assert min(turn.at_ms or 0.0 for turn in turns) == 0
    assert all(turn.input_tokens > 0 and turn.output_tokens > 0 and turn.delay_ms >= 0 for turn in turns)
    assert all(math.isfinite(turn.at_ms or 0.0) for turn in turns)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), trace_format=st.sampled_from(FORMATS), is_appended=st.booleans())
def test_any_bytes_are_refused_in_one_line(tmp_path: Path, data: bytes, trace_format: str, is_appended: bool) -> None:
    path = tmp_path / "t"
    path.write_bytes(encoded(trace_format) + data if is_appended else data)
    try:
        load(path, trace_format)
    except ConfigError as error:
        checked(path, error)
