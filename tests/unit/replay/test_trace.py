"""Trace: rows of both formats, and the errors of bad ones."""

import gzip
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.trace import read


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_row_without_a_session_is_a_separate_session(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 2]}',
    )
    first, second = read([path])
    assert [turn.at_ms for turn in (*first.turns, *second.turns)] == [0, 3000]
    assert tuple(second.turns[0].hash_ids) == (0, 2)


def test_rows_of_one_session_are_turns_and_alternative_field_names_are_accepted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"created_time": 7, "input_tokens": 10, "output_tokens": 5, "hash_ids": [0], "session_id": "a"}',
        '{"input_tokens": 20, "output_tokens": 6, "hash_ids": [0], "session_id": "a", "delay": 250}',
    )
    (session,) = read([path])
    assert [turn.at_ms for turn in session.turns] == [0, None]
    assert session.turns[1].delay_ms == 250


def test_delta_row_extends_the_previous_turn(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0, 1], "session_id": 1}',
        '{"input_length": 60, "output_length": 5, "hash_ids": [7, 8], "session_id": 1, "delay": 1}',
    )
    (session,) = read([path], "mooncake-delta", 64)
    assert session.turns[1].input_tokens == 160
    assert tuple(session.turns[1].hash_ids) == (0, 7, 8)


def test_blocks_without_hash_ids_are_unique(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 1000, "output_length": 5}'
    first, second = read([write(tmp_path / "t.jsonl", row, row)])
    assert len(first.turns[0].hash_ids) == 2
    assert not set(first.turns[0].hash_ids) & set(second.turns[0].hash_ids)


def test_gzip_trace_is_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n'))
    assert len(read([str(path)])) == 1


def test_times_begin_at_zero_and_may_be_unordered_and_negative_as_in_the_released_replay(tmp_path: Path) -> None:
    row = '{{"timestamp": {}, "input_length": 9, "output_length": 5, "hash_ids": [0]}}'
    found = read([write(tmp_path / "t.jsonl", row.format(3000), row.format(-5), row.format(1000))])
    assert [session.turns[0].at_ms for session in found] == [3005, 0, 1005]


def test_turns_of_a_session_must_be_in_the_order_of_time(tmp_path: Path) -> None:
    row = '{{"session_id": "a", "timestamp": {}, "input_length": 9, "output_length": 5, "hash_ids": [0]}}'
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: timestamp is 500: must be 1000 or more"):
        read([write(tmp_path / "t.jsonl", row.format(1000), row.format(500))])


@pytest.mark.parametrize("line", ["{", '{"timestamp": 0}', '{"input_length": "x", "output_length": 1}'])
def test_malformed_trace_row_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl:1"):
        read([write(tmp_path / "t.jsonl", line)])


def test_missing_trace_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        read(["nowhere.jsonl"])
