"""A real frontend's request trace: compressed files that survive its end, and messages through a real NATS server."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.nats import NatsServer
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.s3 import REGION, S3Server
from tests.otlp_collector import Collector, facts_of

from dynamo.runtime.config import nats_options
from dynamo.runtime.transports.nats.connection import NatsConnection

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def make_cluster(folder: Path, variables: dict[str, str]) -> Cluster:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return Cluster(folder)


def test_trace_files_are_complete_after_frontend_shutdown(tmp_path: Path) -> None:
    records = {"DYN_REQUEST_TRACE_RECORDS": "request_end,request_payload", "DYN_REQUEST_TRACE_FILE_ROLL_LINES": "4"}
    path = tmp_path / "traces" / "trace"
    cluster = make_cluster(tmp_path, {"DYN_REQUEST_TRACE": "1", "DYN_REQUEST_TRACE_FILE_PATH": str(path), **records})
    try:
        cluster.mocker("--speedup-ratio", "0")
        for stream in (False, True, True):
            assert cluster.post({**CHAT, "stream": stream}).status_code == 200
        cluster.frontend.terminate()
        assert cluster.frontend.wait(DEADLINE_S) == 0
    finally:
        cluster.stop()
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["trace.000000.jsonl.gz", "trace.000001.jsonl.gz"]
    rows = [json.loads(line)["event"] for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    ends = [row["request"] for row in rows if row["event_type"] == "request_end"]
    payloads = [row["payload"] for row in rows if row["event_type"] == "request_payload"]
    assert [one["output_tokens"] for one in ends] == [4, 4, 4]
    assert {one["request_id"] for one in ends} == {one["request_id"] for one in payloads}
    assert all(one["response"]["usage"]["completion_tokens"] == 4 for one in payloads)
    assert all(one["response"]["choices"][0]["message"]["content"] for one in payloads)


def test_audit_records_every_line_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = {"DYN_AUDIT_SINKS": "file", "DYN_AUDIT_OUTPUT_PATH": str(path), "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl"}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT} for n in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in audit.items():
            patch.setenv(name, value)
        cluster = Cluster(tmp_path, "--batch-dir", str(tmp_path / "batches"))
    try:
        cluster.mocker("--speedup-ratio", "0")
        with cluster.openai() as client:
            content = "\n".join(map(json.dumps, lines)).encode()
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch never completed")
            assert client.batches.retrieve(batch.id).request_counts.model_dump() == {
                "completed": 3, "failed": 0, "total": 3,
            }  # fmt: skip
        wait_until(lambda: cluster.metric("dynamo_frontend_inflight_requests") == 0, "a line is still in flight")
        cluster.frontend.terminate()
        assert cluster.frontend.wait(DEADLINE_S) == 0
    finally:
        cluster.stop()
    payloads = [json.loads(line)["event"]["payload"] for line in path.read_text().splitlines()]
    assert [one["payload_complete"] for one in payloads] == [True] * 3
    assert all(one["response"]["choices"][0]["message"]["content"] for one in payloads)


async def test_nats_subscriber_receives_every_row(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        settings = {"NATS_SERVER": server.url, "DYN_REQUEST_TRACE": "1", "DYN_REQUEST_TRACE_SINKS": "nats"}
        listener = NatsConnection(nats_options(variables={"NATS_SERVER": server.url}), "test")
        received: list[Any] = []
        await listener.start()
        subscription = await listener.subscribe(
            "dynamo.request_trace.v1", lambda one: received.append(json.loads(one.data))
        )
        cluster = make_cluster(tmp_path, settings)
        try:
            cluster.mocker("--speedup-ratio", "0")
            assert cluster.post(CHAT).status_code == 200
            cluster.frontend.terminate()
            assert cluster.frontend.wait(DEADLINE_S) == 0
            await listener.settle(subscription)
        finally:
            cluster.stop()
            await listener.close()
    assert [(row["event_type"], row["request"]["output_tokens"]) for row in received] == [("request_end", 4)]


def test_request_trace_reaches_a_bucket_of_a_real_s3_server_and_a_collector(tmp_path: Path) -> None:
    with S3Server(tmp_path, "traces") as store, Collector() as collector:
        settings = {
            "DYN_REQUEST_TRACE": "1",
            "DYN_REQUEST_TRACE_SINKS": "s3,otel",
            "DYN_REQUEST_TRACE_RECORDS": "request_end,request_payload",
            "DYN_REQUEST_TRACE_S3_BUCKET": store.bucket,
            "DYN_REQUEST_TRACE_S3_REGION": REGION,
            "DYN_REQUEST_TRACE_S3_PREFIX": "frontend/",
            "DYN_REQUEST_TRACE_S3_FLUSH_INTERVAL_MS": "100",
            **{name: value for name, value in collector.variables.items() if name.startswith("OTEL_EXPORTER_OTLP")},
            **store.variables,
        }
        cluster = make_cluster(tmp_path, settings)
        try:
            cluster.mocker("--speedup-ratio", "0")
            assert cluster.post(CHAT).status_code == 200
            wait_until(store.objects, "the first batch is not uploaded while the frontend runs")
            assert cluster.post({**CHAT, "stream": True}).status_code == 200
            cluster.frontend.terminate()
            assert cluster.frontend.wait(DEADLINE_S) == 0
        finally:
            cluster.stop()
        objects = store.objects()
    assert all(re.fullmatch(r"frontend/date=[\d-]{10}/hour=\d\d/\d{4}-\d{6}-.+\.jsonl\.gz", key) for key in objects)
    rows = [json.loads(line) for key in sorted(objects) for line in gzip.decompress(objects[key]).splitlines()]
    assert sorted(row["event_type"] for row in rows) == ["request_end"] * 2 + ["request_payload"] * 2
    records = [facts_of(one) for one in collector.logs]
    assert sorted(str(one["event_type"]) for one in records) == sorted(row["event_type"] for row in rows)
    assert {json.loads(str(one["payload"]))["schema"] for one in records} == {"dynamo.request.trace.v1"}


def test_rows_that_the_store_refuses_are_counted_and_requests_are_served(tmp_path: Path) -> None:
    with S3Server(tmp_path, "traces") as store:
        settings = {
            "DYN_REQUEST_TRACE": "1",
            "DYN_REQUEST_TRACE_SINKS": "s3",
            "DYN_REQUEST_TRACE_S3_BUCKET": store.bucket,
            "DYN_REQUEST_TRACE_S3_REGION": REGION,
            "DYN_REQUEST_TRACE_S3_FLUSH_INTERVAL_MS": "50",
            **store.variables,
            "AWS_SECRET_ACCESS_KEY": "wrong",
        }
        cluster = make_cluster(tmp_path, settings)
        try:
            cluster.mocker("--speedup-ratio", "0")
            assert cluster.post(CHAT).status_code == 200
            dropped = "dynamo_frontend_request_trace_dropped_total"
            cluster.wait_until(lambda: cluster.metric(dropped) == 1, "the lost row is not counted")
            assert cluster.post(CHAT).status_code == 200
        finally:
            cluster.stop()
        assert store.objects() == {}
        warnings = [
            line for line in (tmp_path / "frontend0.log").read_text().splitlines() if "failed to upload" in line
        ]
        assert warnings and "with 1 rows" in warnings[0]


def test_frontend_refuses_the_s3_sink_without_a_bucket(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, {"DYN_REQUEST_TRACE": "1", "DYN_REQUEST_TRACE_SINKS": "s3"})
    try:
        assert cluster.frontend.wait(DEADLINE_S) == 2
    finally:
        cluster.stop()
