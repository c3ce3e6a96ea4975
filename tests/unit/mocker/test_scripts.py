"""Scripted outputs: recorded ones, and ones with markers."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.mocker.scripts import read_answers, read_reasoning


def test_reasoning_script_places_its_start_and_end_tokens_by_ratio() -> None:
    text = '{"start_thinking_token_id": 7, "end_thinking_token_id": 9, "thinking_ratio": 0.5}'
    assert read_reasoning(text).marks(10) == {0: 7, 4: 9}
    assert read_reasoning(text).marks(2) == {}, "there is no room for two marks"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "start_thinking_token_id"),
        ("[", "--reasoning"),
        ('{"start_thinking_token_id": 7, "end_thinking_token_id": 9, "thinking_ratio": 2}', "expected 0 to 1"),
        ('{"start_thinking_token_id": -7, "end_thinking_token_id": 9, "thinking_ratio": 0}', "zero or more"),
    ],
)
def test_invalid_reasoning_script_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_reasoning(text)


def test_recorded_responses_are_indexed_by_request_or_turn(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"output_token_ids": [1], "session_id": "s", "turn": 7}\n'
        '{"output_token_ids": [2], "session_id": "s", "request_id": "q"}\n'
        '{"output_length": 3, "session_id": "s"}\n'
        '{"output_token_ids": [4], "session_id": "s"}\n'
    )
    assert read_answers(str(path)) == {"s:0": [1], "q": [2], "s:3": [4]}


def test_recorded_responses_without_request_or_turn_are_indexed_by_id_or_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "output_length": 2, "output_token_ids": [5, 6], "output_replay_id": "a"}\n'
        '{"output_token_ids": [7], "request_id": 12}\n\n'
        '{"output_token_ids": [8]}\n'
    )
    assert read_answers(str(path)) == {"a": [5, 6], "12": [7], "3": [8]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"output_length": 3, "output_token_ids": [5]}', "output_length is 3"),
        ('{"output_token_ids": [5], "output_replay_id": 1}\n' * 2, "line 2: duplicate id 1"),
        ("no", "line 1"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_answers(str(path))


def test_missing_trace_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_answers(str(tmp_path / "none"))
