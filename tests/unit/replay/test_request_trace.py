"""Request trace: a frontend's rows, replayed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.main import main
from dynamo.replay.request_trace import sessions_of


def row(name: str, at_ms: int, hashes: list[int], *, session: str | None = None, block: int = 16) -> dict[str, Any]:
    found: dict[str, Any] = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + 50,
        "request": {
            "request_id": name,
            "request_received_ms": at_ms,
            "total_time_ms": 50.0,
            "output_tokens": 7,
            "replay": {
                "trace_block_size": block,
                "input_length": 16 * len(hashes) + 5,
                "input_sequence_hashes": hashes,
            },
        },
    }
    if session is not None:
        found["agent_context"] = {"session_id": session}
    return found


def lines(*rows: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(f"t:{number}", json.dumps(one).encode()) for number, one in enumerate(rows, 1)]


def test_trace_times_are_relative_to_the_first_request_and_hash_ids_are_kept() -> None:
    found, block_tokens = sessions_of(lines(row("b", 9500, [1 << 63, 4]), row("a", 9000, [1 << 63, 3])))
    assert block_tokens == 16
    assert [session.turns[0].at_ms for session in found] == [500, 0]
    assert [session.turns[0].hash_ids[0] for session in found] == [1 << 63] * 2
    assert all(len(session.turns[0].hash_ids) == 3 for session in found)


def test_rows_of_a_session_are_its_turns_in_order() -> None:
    found, _ = sessions_of(lines(row("b", 9500, [1, 2], session="s"), row("a", 9000, [1], session="s")))
    assert [turn.request_id for turn in found[0].turns] == ["a", "b"]


def test_other_event_types_are_skipped() -> None:
    tool = {"event_type": "tool_start", "event_time_unix_ms": 1}
    bare = row("x", 1, [1])
    del bare["request"]["replay"]
    found, _ = sessions_of(lines(tool, bare, row("a", 5, [1])))
    assert [session.session_id for session in found] == ["a"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("a", 1, [1]), row("b", 2, [1], session="s")],
        [row("a", 1, [1]), row("b", 2, [1], block=32)],
        [{**row("a", 1, [1]), "schema": "another.v9"}],
        [{"event_type": 4}],
    ],
)
def test_malformed_request_trace_rows_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError):
        sessions_of(lines(*rows))


def test_replay_command_reads_a_request_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(
        b"".join(line + b"\n" for _, line in lines(*(row(f"r{n}", n * 40, [1, 2, n + 3]) for n in range(20))))
    )
    flags = [str(trace), "--trace-format=dynamo", "--router-mode=kv", '--extra-engine-args={"block_size": 16}']
    assert main(flags) == 0
    assert "Request Count" in capsys.readouterr().out


def test_wrapped_rows_of_a_frontend_trace_equal_plain_rows() -> None:
    alone = lines(row("a", 9000, [1, 2]))
    wrapped = [(place, b'{"timestamp": 17, "event": ' + line + b"}") for place, line in alone]
    assert sessions_of(wrapped) == sessions_of(alone)
    with pytest.raises(ConfigError, match="t:1"):
        sessions_of([("t:1", b'{"timestamp": 17}')])


def test_replay_of_a_written_request_trace_is_identical(tmp_path: Path) -> None:
    trace, first, second = (tmp_path / name for name in ("t.jsonl", "1.jsonl", "2.jsonl"))
    load = ["--input-tokens=700", "--output-tokens=20", "--request-count=60", "--arrival-interval-ms=30"]
    load += ["--shared-prefix-ratio=0.8", "--num-prefix-groups=3"]
    cluster = ["--num-workers=2", "--router-mode=kv_router"]
    assert main([*load, *cluster, f"--report-jsonl={first}", f"--report-request-trace={trace}"]) == 0
    assert main([str(trace), "--trace-format=dynamo", *cluster, f"--report-jsonl={second}"]) == 0
    figures = ("request_id", "arrival_ms", "ttft_ms", "e2e_latency_ms", "cached_tokens", "worker")

    def read(path: Path) -> list[list[Any]]:
        return [[json.loads(line)[name] for name in figures] for line in path.read_text().splitlines()]

    assert read(second) == read(first)


def test_request_trace_contains_sessions_and_their_subagents(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    load = ["--input-tokens=100", "--output-tokens=5", "--request-count=6", "--arrival-interval-ms=10"]
    assert main([*load, "--turns-per-session=3", f"--report-request-trace={trace}"]) == 0
    rows = [json.loads(line)["event"] for line in trace.read_text().splitlines()]
    assert {one["schema"] for one in rows} == {"dynamo.request.trace.v1"}
    assert sorted(one["agent_context"]["session_id"] for one in rows) == ["s0"] * 3 + ["s1"] * 3
    found, _ = sessions_of(lines(*rows))
    assert [len(session.turns) for session in found] == [3, 3]
