"""Public traces: small files in each format, made for these tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession
from dynamo.replay.main import main
from dynamo.replay.public_traces import read_public


def read(
    tmp_path: Path, trace_format: str, *rows: Any, name: str = "t.jsonl", **more: Any
) -> tuple[list[ReplaySession], int]:
    path = tmp_path / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return read_public([str(path)], trace_format, **more)


def test_bailian_chats_are_linked_by_their_parents_and_have_blocks_of_16_tokens(tmp_path: Path) -> None:
    found, block = read(
        tmp_path,
        "bailian",
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 40, "output_length": 9, "turn": 1, "type": "text", "hash_ids": [1, 2, 3]},
        {"chat_id": 9, "parent_chat_id": 8, "timestamp": 70.0, "input_length": 80, "output_length": 5, "turn": 3, "hash_ids": [1, 2, 4, 5, 6]},
        {"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.5, "input_length": 60, "output_length": 5, "turn": 2, "hash_ids": [1, 2, 4, 5]},
        {"chat_id": 3, "parent_chat_id": -1, "timestamp": 60.0, "input_length": 10, "output_length": 0},
    )  # fmt: skip
    assert block == 16
    chats = {session.session_id: session.turns for session in found}
    assert [turn.request_id for turn in chats["7"]] == ["7", "8", "9"]
    assert [turn.at_ms for turn in chats["7"]] == [1000.0, 2500.0, 10_000.0]
    assert chats["7"][1].hash_ids == (1, 2, 4, 5)
    assert len(chats["3"][0].hash_ids) == 1
    assert chats["3"][0].output_tokens == 1


WEKA = {
    "id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0,
    "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 20, "hash_ids": [1, 2], "input_types": [], "output_types": [], "stop": "x"},
        {"t": 3.0, "type": "subagent", "agent_id": "a", "subagent_type": "x", "duration_ms": 9, "status": "completed", "models": [],
         "requests": [{"t": 0.5, "type": "s", "model": "m", "in": 64, "out": 5, "hash_ids": [1]}]},
        {"t": 8.0, "type": "s", "model": "m", "in": 200, "out": 20, "hash_ids": [1, 2, 3], "think_time": 1.5},
    ],
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
def test_weka_session_has_its_turns_and_its_subagents(tmp_path: Path, indent: int | None) -> None:
    found, block = read(tmp_path, "weka", json.dumps(WEKA, indent=indent) + "\n", name="s.json")
    assert block == 64
    main_session, agent = found
    assert [(turn.at_ms, turn.delay_ms, turn.input_tokens) for turn in main_session.turns] == [
        (0.0, 0.0, 130),
        (8000.0, 1500.0, 200),
    ]
    assert (agent.parent_id, agent.turns[0].at_ms) == ("s", 3500.0)
    assert agent.turns[0].hash_ids[0] == main_session.turns[0].hash_ids[0] == main_session.turns[1].hash_ids[0]


def test_weka_sessions_share_no_blocks_with_each_other(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "weka", WEKA, {**WEKA, "id": "other"})
    assert not set(found[0].turns[0].hash_ids) & set(found[2].turns[0].hash_ids)
    with pytest.raises(ConfigError, match="block_size differs"):
        read(tmp_path, "weka", WEKA, {**WEKA, "block_size": 32})


def test_baseten_rows_of_a_session_are_its_turns(tmp_path: Path) -> None:
    rows = [
        {"timestamp_start_unix_ms": 1_700_000_002_000, "prompt": "b", "input_tokens": 100, "output_tokens": 7, "total_hashes": [1, 2], "provided_session_id": "x"},
        {"timestamp_start_unix_ms": 1_700_000_000_000, "prompt": "a", "input_tokens": 64, "output_tokens": 5, "total_hashes": [1], "provided_session_id": "x"},
        {"timestamp_start_unix_ms": 1_700_000_001_000, "prompt": "c", "input_tokens": 70, "output_tokens": 5},
    ]  # fmt: skip
    found, block = read(tmp_path, "baseten", *rows, block_tokens=64)
    assert block == 64
    assert [[turn.at_ms for turn in session.turns] for session in found] == [[0.0, 2000.0], [1000.0]]
    assert found[0].turns[1].hash_ids == (1, 2)


def test_baseten_parquet_without_pyarrow_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("dynamo.replay.public_traces.importlib.import_module", missing)
    with pytest.raises(ConfigError, match="pyarrow"):
        read_public([str(tmp_path / "t.parquet")], "baseten")


def test_burst_gpt_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    found, _ = read(
        tmp_path,
        "burst_gpt",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        "5,ChatGPT,472,18,490,Conversation log\n",
        "45,ChatGPT,1087,0,1087,Conversation log\n",
        "118,GPT-4,417,276,693,API log\n",
        name="b.csv",
    )
    assert [(one.turns[0].at_ms, one.turns[0].input_tokens, one.turns[0].output_tokens) for one in found] == [
        (0.0, 472, 18),
        (113_000.0, 417, 276),
    ]


@pytest.mark.parametrize(
    ("trace_format", "text"), [("bailian", "{}"), ("weka", "[]"), ("baseten", '{"input_tokens": 1}')]
)
def test_invalid_line_is_named(tmp_path: Path, trace_format: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: "):
        read(tmp_path, trace_format, text + "\n")


def test_replay_runs_a_public_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(WEKA) + "\n")
    assert main([str(path), "--trace-format=weka", "--num-workers=2", "--router-mode=kv"]) == 0
    assert "Request Count" in capsys.readouterr().out
