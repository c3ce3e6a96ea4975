"""A client's trace goes through our frontend into the released worker's log."""

import http.client
import json
import os
from contextlib import closing

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from tests.cluster.peers import require_peer
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.conformance

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def lines_of(stack, index):
    with open(os.path.join(stack.home, f"process-{index}.log"), encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in file if line.startswith("{") and line.endswith("\n")]


def traced(stack, index):
    return [line for line in lines_of(stack, index) if line.get("trace_id") == TRACE]


def messages(stack, index):
    return [line["message"] for line in traced(stack, index)]


def test_released_worker_logs_the_trace_id_of_our_client():
    require_peer()
    variables = {"DYN_LOGGING_JSONL": "1", "DYN_LOG": "info"}
    recipe = Recipe(name="trace", frontend=ours(), engine=theirs(peer_python()), variables=variables)
    with Stack(recipe, bench_model()) as stack:
        headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 2}
        with closing(http.client.HTTPConnection(HOST, stack.port, timeout=10)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200
            response.read()
            # Both write their last line after the response has ended.
            wait_until(lambda: "request completed" in messages(stack, 0), "our log has no end of the request")
            wait_until(lambda: messages(stack, 1), "the released worker's log has no line of the trace")
        our_output, theirs_output = traced(stack, 0), traced(stack, 1)
    assert [line["message"] for line in our_output] == ["request received", "http response sent", "request completed"]
    assert theirs_output
    for line in theirs_output:
        assert line["parent_id"] == PARENT
        assert (line["request_id"], line["x_request_id"]) == (our_output[0]["request_id"], "mine")
        assert set(line) >= {"time", "level", "target", "message", "span_name", "span_id", "component", "endpoint"}
