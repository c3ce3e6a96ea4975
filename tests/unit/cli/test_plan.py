"""`dynamo plan` shows the decisions of a planner's record and decides them again; a damaged record is one line."""

import json
from pathlib import Path

import pytest

from dynamo.cli import __main__ as command
from dynamo.cli import plan as module
from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import parse
from dynamo.planner.config.plugins import PluginStage
from dynamo.planner.core.pipeline import PluginReply, PluginSpec
from dynamo.planner.core.record import Start, encode, recorded
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.plugins.types import ComponentTarget, OverrideResult, ProposeStageResponse, RejectResult
from dynamo.protocols.planner import EngineCapabilities, TickInput, TrafficObservation, WorkerCounts

CONFIG = parse(
    {"mode": "agg", "environment": "virtual", "max_gpu_budget": 4, "optimization_target": "sla", "load_predictor": "constant",
     "enable_load_scaling": True, "load_adjustment_interval_seconds": 5, "throughput_adjustment_interval_seconds": 10}
)  # fmt: skip
USER = PluginSpec(plugin_id="user", stage=PluginStage.PROPOSE, priority=1)
WANTED = OverrideResult(targets=[ComponentTarget(sub_component_type="decode", replicas=9)], reason="a sale begins")
REPLIES = (
    PluginReply(ProposeStageResponse(override=WANTED)),
    PluginReply(None, "no answer"),
    PluginReply(ProposeStageResponse(reject=RejectResult(reason="maintenance"))),
)


def record() -> list[bytes]:
    """A record of three ticks: a plugin requests more than the budget, fails, and rejects."""
    start = Start(
        config=CONFIG.as_json(),
        capabilities=WorkerCapabilities(decode=EngineCapabilities(num_gpu=1, context_length=4096, max_kv_tokens=100_000)),
        plugins=[USER],
    )  # fmt: skip
    core = start.planner()
    scheduled = core.first_tick(0.0)
    lines = [encode(start)]
    for reply in REPLIES:
        seen = TickInput(
            now_s=scheduled.at_s,
            traffic=TrafficObservation(duration_s=10, num_req=120, isl=3000, osl=100, kv_hit_rate=0.5),
            worker_counts=WorkerCounts(ready_num_decode=2, expected_num_decode=2),
        )
        recording = recorded(core, scheduled, seen)
        while recording.decision is None:
            recording.reply([reply for _ in recording.calls])
        lines.append(encode(recording.tick))
        scheduled = core.next_tick(scheduled, scheduled.at_s)
    return lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ticks.jsonl"
    path.write_bytes(b"".join(record()))
    return path


def test_decisions_are_a_table_with_proposals_clamps_and_reasons(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        assert command.run(["plan", "explain", str(path)]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        head, first = text.splitlines()[:2]
        assert head.split() == ["tick", "time", "s", "prefill", "decode", "requests", "input", "output", "action"]
        assert first.split() == ["1", "5.0", "-", "2/2", "120", "3000", "100", "decode=4"]
        words = " ".join(text.split())
        for found in (
            "traffic: in 10 s, KV hit rate 0.5",
            "propose: user: decode SET 9 (a sale begins)",
            "clamped: GPU budget: 0/9 became 0/4",
            "user: failed: no answer",
            "predicted: num_req 120, isl 3000, osl 100, kv_hit_rate 0.5 by builtin_load_predict",
            "user: rejected: maintenance",
            "rejected by user: maintenance",
        ):
            assert found in words


def test_last_limits_the_decisions_and_keeps_their_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.plan(["explain", str(path), "--last=2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["tick"] for one in shown] == [2, 3]
    assert shown[1]["worker_counts"]["ready_num_decode"] == 2
    assert shown[1]["decision"]["reject_reason"] == "maintenance"


def test_replay_reports_equal_decisions_and_the_first_different_field(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.plan(["replay", str(path)]) == 0
    assert capsys.readouterr().out == "3 ticks, all decisions equal\n"
    path.write_bytes(path.read_bytes().replace(b'"scale_to":{"num_decode":4', b'"scale_to":{"num_decode":3'))
    assert module.plan(["replay", str(path)]) == 1
    assert capsys.readouterr().out == "tick 1 (5 s): scale_to.num_decode: recorded 3, now 4\n"


def test_directory_argument_selects_its_newest_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = record()
    for name, count in (("20260101T000000.1Z-0000", 2), ("20260101T000000.1Z-0001", 4), ("20250101T000000.1Z-0009", 3)):
        (tmp_path / f"planner-ticks-{name}.jsonl").write_bytes(b"".join(lines[:count]))
    assert module.plan(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3 ticks, all decisions equal\n"


def test_incomplete_last_line_is_skipped(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes()[:-30])
    assert module.plan(["replay", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "2 ticks, all decisions equal\n"
    assert captured.err == f"note: {path}: line 4 is not complete and is left out\n"


def test_record_without_ticks_has_no_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ticks.jsonl").write_bytes(record()[0])
    assert module.plan(["explain", str(tmp_path / "ticks.jsonl")]) == 0
    assert capsys.readouterr().out.endswith("no ticks yet.\n")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "the file is empty; expected a planner's record"),
        (b"hello\n", r"line 1 is not JSON; expected a planner's record \(schema dynamo.planner.ticks.v1\)"),
        (b"\xff\xfe\x00\n", "line 1 is not JSON"),
        (b"[]\n", "line 1 has no schema"),
        (b'{"schema": "other.v2"}\n', "line 1 has the schema 'other.v2'"),
        (b'{"schema": "dynamo.planner.ticks.v1"}\n', "line 1 is damaged: Object missing required field `config`"),
    ],
)
@pytest.mark.parametrize("word", ["explain", "replay"])
def test_foreign_file_is_one_line(word: str, content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=cause) as raised:
        module.plan([word, str(path)])
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b"not JSON\n", b'{"scheduled": "\xff"}\n'])
@pytest.mark.parametrize("word", ["explain", "replay"])
def test_malformed_tick_is_one_error_line_with_its_number(word: str, line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    lines = record()
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ConfigError, match=r"ticks.jsonl: .*line 3.*") as raised:
        module.plan([word, str(path)])
    assert "\n" not in str(raised.value)


def test_tick_without_a_plugin_reply_is_one_error_line(tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    ticks = record()
    tick = json.loads(ticks[1])
    tick["replies"] = []
    path.write_bytes(ticks[0] + json.dumps(tick).encode() + b"\n")
    with pytest.raises(ConfigError, match="line 2: expected a reply of user, found no reply"):
        module.plan(["replay", str(path)])


def test_invalid_plan_arguments_are_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, cause in (
        (["explain"], "FILE: missing"),
        (["explain", str(tmp_path)], "no record"),
        (["replay", str(tmp_path / "absent")], "cannot read: No such file"),
        (["explain", "ticks.jsonl", "--last=0"], "--last 0: must be at least 1"),
        (["foresee"], "dynamo plan foresee: expected explain or replay"),
    ):
        with pytest.raises(ConfigError, match=cause):
            module.plan(argv)
    assert module.plan([]) == 0
    assert "dynamo plan explain" in capsys.readouterr().out
