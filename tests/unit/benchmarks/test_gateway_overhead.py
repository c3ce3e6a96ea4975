"""Overhead of a gateway, and the backend that both measurements use."""

import json
from dataclasses import replace

import pytest
from benchmarks.fake_openai import ANSWER, render, take
from benchmarks.gateway_overhead import GatewayConfig, Overhead, markdown
from benchmarks.loadgen import Load, Report, Snapshot, Tally, build_requests, read_head, read_tokens

from dynamo.core.errors import ConfigError

LOAD = Load(host="h", port=1, concurrency=1)
BLANK = Report.of(LOAD, Tally(), Snapshot(0.0, {}, 0.0, {}), Snapshot(1.0, {}, 0.0, {}), 0)


def report(latency_ms, noise):
    return replace(BLANK, latency_ms=dict.fromkeys(("p50", "p90", "p99"), latency_ms), requests_per_s=10.0, noise=noise)


def test_gateway_overhead_excludes_the_backend_time_and_uses_the_quietest_run():
    found = Overhead.of([report(90.0, 0.5), report(62.0, 0.1)], 60.0)
    assert (found.p50_ms, found.p99_ms, found.requests_per_s) == (2.0, 2.0, 10.0)


def test_gateway_table_compares_each_concurrency():
    found = {
        "ours": {1: Overhead(100.0, 1.0, 2.0, 3.0, 200.0)},
        "litellm": {1: Overhead(20.0, 10.0, 10.0, 10.0, 4000.0)},
        "backend alone": {1: Overhead(110.0, 0.1, 0.1, 0.1, 0.0)},
    }
    assert "| 1 | **ours/litellm** | **5.00** | **0.10** | **0.20** | **0.30** | **0.05** |" in markdown(found)
    assert "ours/litellm" not in markdown({"ours": found["ours"]})


def test_quick_gateway_run_has_two_concurrencies():
    assert GatewayConfig(quick=True).points() == [1, 64]
    assert GatewayConfig(quick=True, concurrency=[7]).points() == [7]
    with pytest.raises(ConfigError):
        GatewayConfig(concurrency=[0])


def test_backend_response_is_parsed_by_the_load_generator():
    head, _, body = render(ANSWER).partition(b"\r\n\r\n")
    assert read_head(head) == (200, len(body))
    assert read_tokens(body) == (64, 16)
    assert json.loads(body)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("cut", range(0, 120, 7))
def test_backend_splits_pipelined_requests_at_any_segmentation(cut):
    one = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    data = one + one + b"POST"
    first, rest = take(data[:cut])
    second, rest = take(rest + data[cut:])
    assert (first + second, rest) == (2, b"POST")


def test_unary_request_has_no_stream_field():
    head, tail = build_requests(LOAD, "m", ["text"], ["word"], is_stream=False).pool[0]
    assert b"stream" not in head + tail
    head, tail = build_requests(LOAD, "m", ["text"], ["word"]).pool[0]
    assert b'"stream": true' in head + tail
