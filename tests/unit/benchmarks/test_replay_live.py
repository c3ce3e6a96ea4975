"""replay_live: a stack that fails is named, and the others are measured."""

from typing import Any

import pytest
from benchmarks import replay_live
from benchmarks.stacks import Implementation, StackFailed


def test_failed_stack_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = dict.fromkeys(replay_live.FIGURES, 10.0)
    written: list[dict[str, Any]] = []

    def compare(bench: replay_live.LiveBench, system: Implementation, engine: str) -> dict[str, Any]:
        if engine == "sglang":
            raise StackFailed("the engine ended with 2")
        return {"overhead_ms": 1.0, "check": dict.fromkeys(("live", "simulated", "with_overhead"), figures)}

    monkeypatch.setattr(replay_live, "compare", compare)
    monkeypatch.setattr(replay_live, "implementations", lambda: {"ours": Implementation("ours", "python", "0")})
    monkeypatch.setattr(replay_live, "kept_entries", dict)
    monkeypatch.setattr(replay_live, "write_result", lambda name, found, is_whole: written.append(found) or name)
    monkeypatch.setattr("sys.argv", ["replay_live", "--engine-types", "sglang,trtllm"])
    assert replay_live.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("failed")] == [
        "failed: sglang, ours: the engine ended with 2",
        "failed: sglang, theirs: not installed",
        "failed: trtllm, theirs: not installed",
    ]
    assert [list(one["engines"]["trtllm"]) for one in written] == [["ours"]]
