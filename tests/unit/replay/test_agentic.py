"""Agentic: dependencies between requests, and their delays."""

import gzip
import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.agentic import AgenticLoad, Need, Play
from dynamo.replay.agentic_trace import plays_of, trajectories_of
from dynamo.replay.engine import EngineArgs
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.scenario import Scenario
from dynamo.replay.trace_lines import lines


def turn(name: str, at_ms: float | None = None) -> Turn:
    return Turn(name, 100, 10, (1, 2), at_ms)


def helper_play(name: str = "p", at_ms: float = 1000.0) -> Play:
    """Return an agent whose request starts a helper at that time, and continues after the helper and its own tool."""
    agent = ReplaySession(f"{name}/agent", [turn(f"{name}.a0", at_ms), turn(f"{name}.a1")])
    helper = ReplaySession(f"{name}/helper", [turn(f"{name}.h0")], f"{name}/agent")
    needs = {
        f"{name}.h0": [Need(f"{name}.a0", "dispatch", 50.0)],
        f"{name}.a1": [Need(f"{name}.a0", "complete", 300.0), Need(f"{name}.h0", "complete")],
    }
    return Play(name, [agent, helper], needs).check()


def due(found: object) -> list[tuple[float, str]]:
    return [(at_ms, session.turns[place].request_id) for at_ms, session, place in found]  # type: ignore[attr-defined]


def test_agentic_request_starts_when_all_its_dependencies_are_complete() -> None:
    play = helper_play()
    load = AgenticLoad([play])
    agent, helper = play.sessions
    assert due(load.first()) == [(1000.0, "p.a0")]
    assert due(load.begun(agent, 0, 1010.0)) == [(1060.0, "p.h0")]
    assert due(load.begun(helper, 0, 1070.0)) == []
    assert due(load.after(agent, 0, 1500.0)) == []
    assert due(load.after(helper, 0, 2500.0)) == [(2500.0, "p.a1")]
    assert due(load.after(agent, 1, 3000.0)) == []


def test_tool_duration_is_counted_from_the_previous_response() -> None:
    play = helper_play()
    load = AgenticLoad([play])
    agent, helper = play.sessions
    list(load.first())
    load.begun(agent, 0, 1010.0)
    load.after(helper, 0, 1200.0)
    assert due(load.after(agent, 0, 1500.0)) == [(1800.0, "p.a1")]


def test_lane_starts_the_next_play_when_its_play_is_complete() -> None:
    plays = [helper_play("p", 0.0), helper_play("q", 90_000.0)]
    load = AgenticLoad(plays, lanes=1)
    agent, helper = plays[0].sessions
    assert due(load.first()) == [(0.0, "p.a0")]
    load.begun(agent, 0, 10.0)
    load.after(agent, 0, 500.0)
    load.after(helper, 0, 600.0)
    assert due(load.after(agent, 1, 900.0)) == [(900.0, "q.a0")]


def test_speedup_shortens_tool_durations_and_pauses() -> None:
    play = helper_play()
    load = AgenticLoad([play], speedup=2.0)
    assert due(load.first()) == [(500.0, "p.a0")]
    assert due(load.begun(play.sessions[0], 0, 510.0)) == [(535.0, "p.h0")]


def test_plays_with_circular_or_unknown_dependencies_are_refused() -> None:
    session = ReplaySession("s", [turn("a"), turn("b")])
    with pytest.raises(ConfigError, match="circular dependency"):
        Play("p", [session], {"a": [Need("b")], "b": [Need("a")]}).check()
    with pytest.raises(ConfigError, match="unknown request"):
        Play("p", [session], {"a": [Need("c")]}).check()
    with pytest.raises(ConfigError, match="duplicate request id"):
        Play("p", [ReplaySession("s", [turn("a"), turn("a")])], {}).check()


def agentic_lines(scope: str = "local") -> list[tuple[str, bytes]]:
    header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": scope}
    rows = []
    for play in ("p", "q"):
        rows += [
            {
                "request_id": f"{play}0",
                "play_id": play,
                "session_id": "main",
                "input_length": 128,
                "output_length": 20,
                "hash_ids": [1, 2],
                "not_before_ms": 5,
            },
            {
                "request_id": f"{play}1",
                "play_id": play,
                "session_id": "sub",
                "input_length": 200,
                "output_length": 20,
                "hash_ids": [1, 3],
                "dependencies": [{"request_id": f"{play}0", "trigger": "dispatch", "delay_ms": 7, "relation": "spawn"}],
            },
        ]
    return [(f"t:{number}", json.dumps(row).encode()) for number, row in enumerate([header, *rows], 1)]


def test_agentic_trace_contains_helpers_and_request_names() -> None:
    plays, block_tokens = plays_of(agentic_lines())
    assert block_tokens == 64
    assert [play.play_id for play in plays] == ["p", "q"]
    main, sub = plays[0].sessions
    assert (main.session_id, sub.session_id, sub.parent_id) == ("p/main", "p/sub", "p/main")
    assert sub.turns[0].hash_ids[0] == main.turns[0].hash_ids[0]
    assert len(sub.turns[0].hash_ids) == 4  # Blocks without a name belong to the request alone.
    assert plays[0].needs["p1"] == [Need("p0", "dispatch", 7.0)]


def test_local_hash_ids_differ_per_play_and_global_ones_do_not() -> None:
    def names(scope: str) -> set[int]:
        plays, _ = plays_of(agentic_lines(scope))
        return {play.sessions[0].turns[0].hash_ids[0] for play in plays}

    assert len(names("local")) == 2
    assert len(names("global")) == 1


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"schema": "dynamo.agentic_mooncake", "version": 1, "block_size": 64}', "version"),
        (b"{", "t:1"),
    ],
)
def test_invalid_trace_header_is_refused(line: bytes, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plays_of([("t:1", line)])
    with pytest.raises(ConfigError, match="empty"):
        plays_of([])


def test_trajectory_prompt_grows_by_responses_and_tool_outputs(tmp_path: Path) -> None:
    row = {
        "num_turns": 2,
        "input_prompt_length": 100,
        "assistant_response_length": [10, 20],
        "tool_call_output_length": [200, 300],
        "tool_call_latency": [0.5, 2],
        "final_assistant_response_length": 30,
    }
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    (play,) = trajectories_of(lines([str(path)]), 64)
    turns = play.sessions[0].turns
    assert [(one.input_tokens, one.output_tokens) for one in turns] == [(100, 10), (310, 20), (630, 30)]
    assert turns[1].hash_ids[:2] == turns[0].hash_ids
    assert play.needs["t0.2"] == [Need("t0.1", "complete", 2000.0)]
    with pytest.raises(ConfigError, match="expected 3 answers"):
        trajectories_of([("t:1", json.dumps({**row, "num_turns": 3}).encode())], 64)


def test_agentic_plays_are_simulated_completely(engine: EngineArgs) -> None:
    plays = [helper_play(f"p{number}", number * 20.0) for number in range(12)]
    sessions = [session for play in plays for session in play.sessions]
    scenario = Scenario(sessions=sessions, plays=plays, workers=2, router_mode="kv", engine=engine, block_tokens=64)
    for lanes in (None, 1, 3):
        flights = {
            one.turn.request_id: one
            for one in Scenario(
                sessions=sessions,
                plays=plays,
                lanes=lanes,
                workers=2,
                router_mode="kv",
                engine=engine,
                block_tokens=64,
            )
            .run()
            .flights
        }
        assert len(flights) == 36
        for number in range(12):
            first, helper, last = (flights[f"p{number}.{name}"] for name in ("a0", "h0", "a1"))
            assert helper.arrived_ms == first.placed_ms + 50.0
            assert last.arrived_ms == max(first.finished_ms + 300.0, helper.finished_ms)
    assert len(scenario.run().flights) == 36
    with pytest.raises(ConfigError, match="agentic-lanes"):
        Scenario(sessions=sessions, lanes=2, engine=engine, block_tokens=64).run()
