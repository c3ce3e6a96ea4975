"""A request's trace through two processes: spans at a collector, identities in the log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.otlp_collector import Collector, facts_of

pytestmark = pytest.mark.integration

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
NAMES = ["http-request", "router.route_request", "handle_payload", "engine.generate"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def log_of(folder: Path, name: str) -> list[dict[str, Any]]:
    with open(folder / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.startswith("{")]


def test_one_trace_goes_through_frontend_and_worker(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**collector.variables, "DYN_LOGGING_JSONL": "1", "DYN_LOG": "info"}.items():
        monkeypatch.setenv(name, value)
    with Cluster(tmp_path) as cluster:
        cluster.mocker("--speedup-ratio", "0")
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = cluster.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: {span.name for span in collector.spans} >= set(NAMES), "the spans never came")
    spans = {span.name: span for span in collector.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["http-request"].parent_span_id.hex() == PARENT
    assert spans["router.route_request"].parent_span_id == spans["http-request"].span_id
    assert spans["handle_payload"].parent_span_id == spans["router.route_request"].span_id
    assert spans["engine.generate"].parent_span_id == spans["handle_payload"].span_id
    for name in ("http-request", "engine.generate"):
        facts = facts_of(spans[name])
        assert (facts["input_tokens"], facts["output_tokens"]) == (3, 5)
    assert facts_of(spans["engine.generate"])["disagg_role"] == "agg"
    assert int(str(facts_of(spans["router.route_request"])["worker_id"]), 16) > 0
    assert len({facts_of(span)["request_id"] for span in spans.values()}) == 1
    (completed,) = [line for line in log_of(tmp_path, "frontend0.log") if line["message"] == "request completed"]
    assert (completed["trace_id"], completed["x_request_id"]) == (TRACE, "mine")
    assert completed["span_id"] == spans["http-request"].span_id.hex()
    assert completed["request_id"] == facts_of(spans["http-request"])["request_id"]


def test_a_refused_request_is_a_span_in_error_and_a_line_with_its_trace(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**collector.variables, "DYN_LOGGING_JSONL": "1"}.items():
        monkeypatch.setenv(name, value)
    with Cluster(tmp_path) as cluster:
        wait_until(cluster.is_live, "the frontend never came")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = cluster.http.post("/v1/completions", json={"model": "nobody", "prompt": "x"}, headers=headers)
        assert answer.status_code == 404
        wait_until(lambda: bool(collector.spans), "the span never came")
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), facts_of(span)["error.type"]) == ("http-request", TRACE, "NotFound")
    (refused,) = [line for line in log_of(tmp_path, "frontend0.log") if line["message"] == "request refused"]
    assert (refused["status"], refused["trace_id"]) == (404, TRACE)
