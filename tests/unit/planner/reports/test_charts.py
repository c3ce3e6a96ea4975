"""Charts: panels and traces of a figure, and the page without the extra."""

import sys

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import parse
from dynamo.planner.reports.charts import figure, page, transitions
from dynamo.planner.reports.snapshots import EngineLoad, TickSnapshot

CONFIG = parse({"environment": "virtual"})
SNAPSHOTS = [
    TickSnapshot(timestamp_s=0.0, num_decode_replicas=1, load_decision_reason="scale_up", scale_to_decode=2),
    TickSnapshot(
        timestamp_s=5.0,
        num_decode_replicas=2,
        load_decision_reason="no_change",
        decode_engines=[EngineLoad(worker_id="7", queued_decode_kv_tokens=3, inflight_decode_kv_tokens=4)],
        gpu_hours=0.25,
    ),
]


def test_figure_has_replicas_decisions_and_engines() -> None:
    drawn = figure(SNAPSHOTS, CONFIG, 1000)
    traces = {one["name"]: one for one in drawn["data"]}
    assert traces["Decode Replicas"]["y"] == [1, 2]
    assert traces["Recommended Decode Replicas"]["y"] == [2, None]
    assert traces["Load Decision"]["text"] == ["scale_up", "no_change"]
    assert traces["D 7:dp0 total KV"]["y"] == [None, 7]
    assert "GPU hours: 0.25" in drawn["layout"]["title"]["text"]
    assert any(one["text"] == "KV Capacity (1,000)" for one in drawn["layout"]["annotations"])


def test_every_trace_has_axes_of_the_layout() -> None:
    drawn = figure(SNAPSHOTS, CONFIG, None)
    for one in drawn["data"]:
        assert f"xaxis{one['xaxis'][1:]}" in drawn["layout"]
        assert f"yaxis{one['yaxis'][1:]}" in drawn["layout"]


def test_unknown_number_of_replicas_is_no_transition() -> None:
    counts = (1, None, 1, 2, None, 3)
    assert transitions([TickSnapshot(num_prefill_replicas=one) for one in counts]) == 2


def test_page_without_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-serve\[planner\]'"):
        page(SNAPSHOTS, CONFIG, None)
