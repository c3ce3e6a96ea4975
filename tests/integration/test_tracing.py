"""A request's trace through two processes: spans at a collector, identities in the log."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import ROOT, Cluster
from tests.cluster.processes import ProcessGroup, wait_until
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


def test_one_trace_spans_frontend_and_worker(
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


def test_refused_request_has_an_error_span_and_a_log_line_with_its_trace_id(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**collector.variables, "DYN_LOGGING_JSONL": "1"}.items():
        monkeypatch.setenv(name, value)
    with Cluster(tmp_path) as cluster:
        wait_until(cluster.is_live, "the frontend never came")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = cluster.http.post("/v1/completions", json={"model": "no-such-model", "prompt": "x"}, headers=headers)
        assert answer.status_code == 404
        wait_until(lambda: bool(collector.spans), "the span never came")
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), facts_of(span)["error.type"]) == ("http-request", TRACE, "NotFound")
    (refused,) = [line for line in log_of(tmp_path, "frontend0.log") if line["message"] == "request refused"]
    assert (refused["status"], refused["trace_id"]) == (404, TRACE)


def test_a_disaggregated_and_migrated_request_is_one_trace_in_spans_and_logs(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**collector.variables, "DYN_LOGGING_JSONL": "1", "OTEL_EXPORT_LOGS_ENABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    engine = ("--block-size", "16", "--num-gpu-blocks-override", "500")
    # 40 tokens take eight seconds: the worker is killed within them on a busy machine too.
    decode = (*engine, "--disaggregation-mode", "decode", "--speedup-ratio", "0.03")
    with Cluster(tmp_path, "--migration-limit", "3") as cluster:
        cluster.wait_until(cluster.is_live, "the frontend did not start")
        cluster.mocker(*engine, "--disaggregation-mode", "prefill")
        decoders: dict[str, subprocess.Popen[bytes]] = {}
        for _ in range(2):
            process = cluster.mocker(*decode)
            workers = cluster.http.get("/console/api/overview").json()["workers"]
            (worker,) = [one["id"] for one in workers if one["role"] == "decode" and one["id"] not in decoders]
            decoders[worker] = process
        failed, request_id = send_and_kill(cluster, decoders)
        cluster.wait_until(
            lambda: len(collector.named("engine.generate")) >= 3 and collector.named("http-request"),
            "spans are missing",
        )
        cluster.wait_until(lambda: len({one.trace_id for one in collector.logs if one.trace_id}) == 1, "no lines")
    spans = {span.span_id: span for span in collector.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}, "control calls of the console have no spans"
    assert {facts_of(span)["request_id"] for span in spans.values()} == {request_id}
    parts = {
        (collector.service_of[key], span.name, spans[span.parent_span_id].name if span.parent_span_id in spans else "")
        for key, span in spans.items()
    }
    assert parts == {
        ("dynamo-frontend", "http-request", ""),
        ("dynamo-frontend", "router.route_request", "http-request"),
        ("dynamo-worker-prefill", "handle_payload", "router.route_request"),
        ("dynamo-worker-prefill", "engine.generate", "handle_payload"),
        ("dynamo-worker-decode", "handle_payload", "router.route_request"),
        ("dynamo-worker-decode", "engine.generate", "handle_payload"),
    }
    (route,) = collector.named("router.route_request")
    (event,) = route.events
    attributes = {one.key: one.value.string_value or one.value.int_value for one in event.attributes}
    assert (event.name, attributes["worker_id"]) == ("migration", failed)
    assert 0 < int(attributes["output_tokens"]) < 40
    logs = {path.name: log_of(tmp_path, path.name) for path in tmp_path.glob("*.log")}
    traced = {name for name, lines in logs.items() if any(one.get("trace_id") == TRACE for one in lines)}
    assert traced == {"frontend0.log", "mocker1.log", "mocker2.log", "mocker3.log"}
    (completed,) = [one for one in logs["frontend0.log"] if one["message"] == "request completed"]
    assert (completed["trace_id"], completed["request_id"]) == (TRACE, request_id)


@contextlib.contextmanager
def stopping(group: ProcessGroup) -> Iterator[None]:
    """Stop the processes of a group at the end."""
    try:
        yield
    finally:
        group.stop()


def send_and_kill(cluster: Cluster, decoders: dict[str, "subprocess.Popen[bytes]"]) -> tuple[str, str]:
    """Kill the decode worker of a stream after its first tokens; return its id and the request's."""
    body = {"model": "m", "prompt": "hello " * 60, "max_tokens": 40, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        while '"text"' not in next(lines):
            pass
        (running,) = cluster.http.get("/console/api/requests?state=running").json()["requests"]
        failed = str(running["workers"][0])
        decoders[failed].kill()
        assert "data: [DONE]" in list(lines)
    decoders[failed].wait()
    return failed, str(running["id"])


def test_the_default_protocol_is_grpc_for_spans_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    variables = {
        "OTEL_EXPORT_ENABLED": "true",
        "OTEL_EXPORT_LOGS_ENABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_BLRP_SCHEDULE_DELAY": "50",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    collector = ProcessGroup(tmp_path)
    collector.start("collector", [sys.executable, "-m", "tests.otlp_grpc_collector", address], cwd=ROOT)
    collector.wait_until(lambda: log_of(tmp_path, "collector.log"), "the collector did not start")
    with stopping(collector), Cluster(tmp_path) as cluster:
        cluster.mocker("--speedup-ratio", "0")
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert cluster.http.post("/v1/completions", json=body, headers=headers).status_code == 200

        def received() -> set[tuple[str, str]]:
            lines = log_of(tmp_path, "collector.log")
            return {(one["kind"], one["service"]) for one in lines if one.get("trace_id") == TRACE}

        expected = {("span", "dynamo-frontend"), ("span", "dynamo-worker"), ("log", "dynamo-frontend")}
        cluster.wait_until(lambda: expected <= received(), "spans or logs are missing")
