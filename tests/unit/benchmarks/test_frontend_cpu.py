"""Measurements, order and summary of the frontend benchmark."""

from dataclasses import replace

import pytest
from benchmarks.frontend_cpu import (
    FULL,
    KV,
    OURS,
    PACED,
    RESULTS,
    SATURATED,
    STEPS,
    THEIRS,
    BenchConfig,
    Point,
    Run,
    estimate_s,
    kv_over_round_robin,
    markdown,
    ratios,
    recipes,
    stage_table,
    stage_us,
    summarise,
)
from benchmarks.loadgen import Cost, Load, Report, Snapshot, Tally
from benchmarks.stacks import ENGINE, FRONTEND, Implementation

from dynamo.core.config import load
from dynamo.core.errors import ConfigError

PEER = Implementation("theirs", "/peer/python", "1000000")
POINT = Point(SATURATED, 64, 1.0, 4.0)
NOTHING = Snapshot(0.0, {}, 0.0, {})
BLANK = Report.of(Load(host="h", port=1, concurrency=64), Tally(), NOTHING, replace(NOTHING, at=1.0), 0)


def run(system, us_per_token, *, rep=0, noise=0.0, stages=None, point=POINT):
    cost = Cost(
        cpu_s=1.0,
        cores=0.5,
        us_per_token=us_per_token,
        us_per_request=us_per_token * 128,
        kernel_us_per_token=1.0,
        rss_mib=100.0,
    )
    report = replace(BLANK, costs={FRONTEND: cost, ENGINE: cost}, noise=noise)
    return Run(system, point, rep, report, stages or {})


def test_full_run_contains_every_claimed_point_and_takes_under_twelve_minutes():
    saturated = {point.concurrency for point in FULL if point.pace == SATURATED}
    paced = {point.concurrency for point in FULL if point.pace == PACED}
    assert (saturated, paced) == ({1, 16, 64, 256}, {64, 256})
    assert {(point.pace, point.concurrency) for point in FULL if point.mode == KV} == {
        (SATURATED, 64),
        (SATURATED, 256),
        (PACED, 64),
    }
    assert estimate_s(FULL, BenchConfig().repetitions, 2) < 720


def test_quick_run_takes_under_two_minutes():
    config = BenchConfig(quick=True)
    assert estimate_s(config.points(), config.repetitions, 2) < 90


def test_only_a_full_run_overwrites_the_published_results(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_BENCH_CACHE", str(tmp_path))
    assert BenchConfig().result_path() == RESULTS
    assert BenchConfig(quick=True).result_path().startswith(str(tmp_path))
    assert BenchConfig(systems=[OURS]).result_path().startswith(str(tmp_path))
    assert BenchConfig(quick=True, out="here.json").result_path() == "here.json"


@pytest.mark.parametrize(
    "flags", [["--reps", "-1"], ["--systems", "mine"], ["--paces", "fast"], ["--router-modes", "kv,best"]]
)
def test_invalid_benchmark_option_is_refused(flags):
    with pytest.raises(ConfigError):
        load(BenchConfig, flags, {})


def test_empty_point_selection_is_refused():
    with pytest.raises(ConfigError, match="no point"):
        BenchConfig(concurrency=[5]).points()


def test_only_this_implementation_is_measured_without_the_peer():
    assert [name for name, _, _ in recipes([OURS, THEIRS], None, is_same_engine=True)] == [OURS]
    assert [name for name, _, _ in recipes([OURS, THEIRS], PEER, is_same_engine=False)] == [OURS, THEIRS]


def test_same_engine_recipe_combines_this_frontend_with_the_released_mocker():
    _, frontend, engine = recipes([OURS, THEIRS], PEER, is_same_engine=True)[-1]
    assert (frontend.name, engine.name) == ("ours", "theirs")


def test_medians_exclude_noisy_runs_unless_all_are_noisy():
    runs = [run(OURS, 4.0), run(OURS, 5.0), run(OURS, 40.0, noise=0.5), run(THEIRS, 20.0, noise=0.9)]
    summary = summarise(runs)[POINT.label]
    assert summary[OURS]["frontend_us_per_token"].median == 4.5
    assert summary[OURS]["frontend_us_per_token"].high == 5.0
    assert summary[THEIRS]["frontend_us_per_token"].median == 20.0


def test_ratio_divides_this_implementation_by_the_released_one():
    share = ratios(summarise([run(OURS, 4.0), run(THEIRS, 16.0)]))
    assert share[POINT.label][OURS]["frontend_us_per_token"] == 0.25
    assert ratios(summarise([run(OURS, 4.0)])) == {}


def test_markdown_table_shows_both_systems_and_the_ratio():
    text = markdown(summarise([run(OURS, 4.0), run(THEIRS, 16.0)]))
    assert "| saturated c=64 | ours | 4.00 |" in text
    assert "| **0.25** |" in text
    assert "| saturated c=64 | theirs | 16.0 |" in text


def test_point_label_contains_the_router_mode():
    assert Point(SATURATED, 64, 1.0, 4.0).label == "saturated c=64"
    assert Point(SATURATED, 64, 1.0, 4.0, KV).label == "saturated c=64 kv"
    assert {point.mode for point in BenchConfig(modes=[KV]).points()} == {KV}


def page(count, **seconds):
    """Return metrics after `count` requests that took that many seconds in each stage."""
    found = {}
    for name, spent in seconds.items():
        series = STEPS[name.replace("_", " ")]
        found |= {series.format("count"): count, series.format("sum"): spent}
    return found


def test_stage_times_are_metric_differences_counted_once():
    before = page(100, template=1.0, tokenize=1.0, preprocess=3.0, route=1.0, dispatch=2.0, queue=9.0, first_token=9.0)
    after = page(
        110, template=1.001, tokenize=1.002, preprocess=3.004, route=1.003, dispatch=2.005, queue=9.01, first_token=9.02
    )
    found = stage_us(before, after)
    assert {name: round(value) for name, value in found.items()} == {
        "template": 100,
        "tokenize": 200,
        "prepare": 100,
        "route": 300,
        "send": 200,
        "queue": 1000,
        "first token": 2000,
    }


def test_remaining_time_is_a_separate_stage():
    stages = {"template": 10.0, "tokenize": 20.0, "prepare": 30.0, "route": 5.0, "send": 35.0, "queue": 2e3}
    stages["first token"] = 4e3
    text = stage_table([run(OURS, 2.0, stages=stages), run(THEIRS, 16.0)])
    assert "| saturated c=64 | ours | 256 | 10.0 | 20.0 | 30.0 | 5.00 | 35.0 | 156 | 2.00 | 4.00 |" in text
    assert "theirs" not in text


def test_cost_of_the_kv_router_is_compared_with_round_robin_before_as_many_workers():
    kv = next(point for point in FULL if (point.pace, point.concurrency, point.mode) == (PACED, 64, KV))
    single, double = (next(one for one in FULL if one == replace(kv, mode="round-robin", workers=n)) for n in (1, 2))
    found = kv_over_round_robin(summarise([run(OURS, 10.0, point=single), run(OURS, 12.0, point=kv)]))
    assert found == {}
    runs = [run(OURS, 10.0, point=single), run(OURS, 11.0, point=double), run(OURS, 12.1, point=kv)]
    assert kv_over_round_robin(summarise(runs)) == {"paced c=64 kv": {OURS: pytest.approx(1.1)}}
