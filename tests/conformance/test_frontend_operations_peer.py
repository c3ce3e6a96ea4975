"""Rows of a request trace and names of metrics, from the released frontend and ours for the same requests."""

import http.client
import json
import os
import time
from contextlib import closing

import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, ours, theirs
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.peers import require_peer
from tools.absent_metrics import (
    ABSENT,
    ABSENT_WITH_KV_ROUTER,
    ABSENT_WITHOUT_KV_ROUTER,
    ABSENT_WITHOUT_REPLICA_SYNC,
)

pytestmark = pytest.mark.conformance

MESSAGES = [{"role": "user", "content": "How many items are there? " * 20}]
TOOL_TURN = [
    *MESSAGES,
    {"role": "assistant", "content": "I shall count."},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS = (
    ("chat", CHAT, {"messages": MESSAGES}, {"x-tenant": "blue"}),
    ("stream", CHAT, {"messages": MESSAGES, "stream": True}, {}),
    ("session", CHAT, {"messages": MESSAGES}, {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p", "x-request-id": "x"}),
    ("final", CHAT, {"messages": TOOL_TURN}, {"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}),
    ("agent", CHAT, {"messages": MESSAGES}, {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "b"}),
    ("thread", CHAT, {"messages": MESSAGES}, {"session-id": "q1", "thread-id": "q2"}),
    ("completion", COMPLETIONS, {"prompt": "hello there you"}, {}),
    ("batch", COMPLETIONS, {"prompt": ["hello there you", "and you"]}, {"x-dynamo-session-id": "s"}),
)  # fmt: skip
VARIABLES = {
    "DYN_REQUEST_TRACE": "1",
    "DYN_REQUEST_TRACE_RECORDS": "request_end,request_payload",
    "DYN_REQUEST_TRACE_FILE_PATH": "trace",
    "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
    "DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS": "50",
    "DYN_REQUEST_TRACE_HTTP_HEADER_CAPTURE_LIST": "x-tenant",
}
WRITTEN_TIMEOUT_S = 30.0
WARM_ROWS = 2  # A stack sends one chat before it is ready.

OWN_LABELS = {"dynamo_component_uptime_seconds"}


class Side:
    """One frontend with our mocker, after one request of each kind."""

    def __init__(self, name, implementation):
        with Stack(
            Recipe(name=name, frontend=implementation, engine=ours(), variables=VARIABLES), bench_model()
        ) as stack:
            for _, path, body, headers in REQUESTS:
                assert send_request(stack, path, body, headers) == 200
            send_request(stack, CHAT, {"messages": MESSAGES, "model": "no-such-model"}, {})
            expected = len([one for one in REQUESTS if one[1] == CHAT]) * 2 + 1 + 2
            self.rows = rows_of(stack, expected + WARM_ROWS)[-expected:]
            with closing(http.client.HTTPConnection(HOST, stack.port, timeout=10)) as connection:
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
        self.families = {family.name: family for family in text_string_to_metric_families(text)}


def names_of(implementation, router_mode, expected=frozenset(), flags=()):
    """Return the metric names of a frontend that has answered a stream.

    The released frontend registers some of them at its first sample: the function waits for the expected names.
    """
    recipe = Recipe(
        name="metrics", frontend=implementation, engine=ours(), router_mode=router_mode, frontend_flags=flags
    )
    with Stack(recipe, bench_model()) as stack:
        assert send_request(stack, CHAT, {"messages": MESSAGES, "stream": True}, {}) == 200
        deadline = time.monotonic() + 15.0
        while True:
            with closing(http.client.HTTPConnection(HOST, stack.port, timeout=10)) as connection:
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
            names = {family.name for family in text_string_to_metric_families(text)}
            if expected <= names or time.monotonic() > deadline:
                return names
            time.sleep(0.2)


def send_request(stack, path, body, headers):
    with closing(http.client.HTTPConnection(HOST, stack.port, timeout=30)) as connection:
        whole = {"model": MODEL_NAME, "max_tokens": 4, **body}
        connection.request("POST", path, json.dumps(whole), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        response.read()
    time.sleep(0.2)  # Rows are ordered by the end of their requests, which are therefore sequential.
    return response.status


def rows_of(stack, count):
    """Return the rows when there are as many."""
    path, rows = os.path.join(stack.home, "trace"), []
    deadline = time.monotonic() + WRITTEN_TIMEOUT_S
    while time.monotonic() < deadline:
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                rows = [json.loads(line) for line in file.read().splitlines() if line.endswith("}")]
        if len(rows) >= count:
            assert all(set(row) == {"timestamp", "event"} for row in rows)
            return [row["event"] for row in rows]
        time.sleep(0.1)
    raise AssertionError(f"{len(rows)} rows of {count}")


@pytest.fixture(scope="module")
def sides():
    require_peer()
    return Side("trace-theirs", theirs(peer_python())), Side("trace-ours", ours())


def shape(value):
    """Return the types of a value's parts."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def by_event(rows, event):
    """Return the rows of one kind; the prompts of the batch, which end in any order, sorted by number."""
    found = [row for row in rows if row["event_type"] == event]
    return found if event == "request_payload" else found[:-2] + sorted(found[-2:], key=number_of)


def number_of(row):
    return row["request"]["request_id"].rsplit("-", 1)[1]


@pytest.mark.parametrize("event", ["request_end", "request_payload"])
def test_audit_rows_have_the_same_fields_and_types(sides, event):
    released, mine = (by_event(side.rows, event) for side in sides)
    assert len(released) == len(mine)
    for theirs_row, our_row in zip(released, mine, strict=True):
        assert shape(our_row) == shape(theirs_row)


def test_both_frontends_trace_the_same_request_end_rows(sides):
    released, mine = (by_event(side.rows, "request_end") for side in sides)
    for theirs_row, our_row in zip(released, mine, strict=True):
        assert our_row.get("agent_context") == theirs_row.get("agent_context")
        for name in ("input_tokens", "output_tokens", "replay", "finish_reason_metadata", "model", "x_request_id"):
            assert our_row["request"].get(name) == theirs_row["request"].get(name), name


def test_both_frontends_trace_the_same_payload_rows(sides):
    released, mine = (by_event(side.rows, "request_payload") for side in sides)
    for theirs_row, our_row in zip(released, mine, strict=True):
        for name in ("endpoint", "model", "http_request_headers", "payload_complete"):
            assert our_row["payload"].get(name) == theirs_row["payload"].get(name), name
        assert our_row["payload"]["request"]["messages"] == theirs_row["payload"]["request"]["messages"]
        our_answer, their_answer = our_row["payload"]["response"], theirs_row["payload"]["response"]
        assert our_answer["usage"]["total_tokens"] == their_answer["usage"]["total_tokens"]
        assert our_answer["object"] == their_answer["object"]


IN_KV = ABSENT_WITH_KV_ROUTER.keys()


@pytest.mark.parametrize(
    ("router_mode", "flags", "absent"),
    [
        ("round-robin", (), ABSENT.keys() | ABSENT_WITHOUT_KV_ROUTER.keys()),
        ("kv", (), ABSENT.keys() | IN_KV | ABSENT_WITHOUT_REPLICA_SYNC.keys()),
        ("kv", ("--router-replica-sync",), ABSENT.keys() | IN_KV),
    ],
)
def test_frontend_has_every_metric_of_the_released_one_but_those_named_with_a_reason(router_mode, flags, absent):
    require_peer()
    released = names_of(theirs(peer_python()), router_mode, frozenset(absent), flags)
    mine = names_of(ours(), router_mode, flags=flags)
    assert sorted(released - mine) == sorted(absent)


def test_metrics_of_one_name_are_of_one_kind_with_the_same_labels(sides):
    released, mine = (side.families for side in sides)
    for name in released.keys() & mine.keys() - OWN_LABELS:
        assert mine[name].type == released[name].type, name
        labels = [
            {label for sample in side[name].samples for label in sample.labels if label != "le"}
            for side in (mine, released)
        ]
        assert labels[0] == labels[1] or not released[name].samples or not mine[name].samples, name


def test_histograms_of_the_frontend_have_the_same_buckets(sides):
    released, mine = (side.families for side in sides)
    for name in released.keys() & mine.keys():
        if name.startswith("dynamo_frontend_") and released[name].type == "histogram" and "event_loop" not in name:
            bounds = [
                sorted({float(one.labels["le"]) for one in side[name].samples if "le" in one.labels})
                for side in (mine, released)
            ]
            assert bounds[0] == bounds[1] or not bounds[0], name
