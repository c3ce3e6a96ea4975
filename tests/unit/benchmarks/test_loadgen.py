"""Load generator's parsing and counting, on responses without a socket."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from benchmarks.loadgen import (
    CHUNKED,
    UNTIL_CLOSED,
    ClosedLoop,
    Connection,
    Load,
    LoadgenConfig,
    Report,
    Requests,
    Snapshot,
    Tally,
    Usage,
    build_requests,
    family,
    quantiles,
    read_head,
    read_tokens,
    spell,
)
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.config import load
from dynamo.core.errors import ConfigError

LOAD = Load(host="127.0.0.1", port=1, concurrency=1, prompt_tokens=9, completion_tokens=3)


class FakeSocket:
    """Socket that records the sent data."""

    def __init__(self):
        self.sent = []

    def fileno(self):
        return 7

    def recv(self, size):
        raise BlockingIOError

    def send(self, data):
        self.sent.append(data)
        return len(data)

    def close(self):
        pass


def chunk(payload):
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(**content):
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def delta(text):
    return event(choices=[{"index": 0, "delta": {"content": text}}])


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12})
ANSWER = HEAD + b"".join(
    chunk(part)
    for part in (delta("one"), delta(' "content":"two"'), delta("0\r\n\r\n"), USAGE, b"data: [DONE]\n\n", b"")
)


def answering(load=LOAD):
    """A loop inside its window with one request sent."""
    loop = ClosedLoop(load, lambda: b"request", {})
    loop.is_measuring = True
    connection = Connection(FakeSocket())
    loop.connections[connection.fd] = connection
    loop._send(connection)
    return loop, connection


def feed(loop, connection, pieces):
    for now, piece in enumerate(pieces, start=1):
        loop._read(connection, piece, connection.sent + now)


def cut(data, places):
    edges = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


def test_response_received_at_once_counts_tokens_by_its_usage():
    loop, connection = answering()
    feed(loop, connection, [ANSWER])
    assert (loop.tally.answers, loop.tally.bad) == (1, 0)
    assert (loop.tally.prompt_tokens, loop.tally.completion_tokens) == (9, 3)
    assert loop.tally.events == 3
    assert loop.tally.gaps_zero == 2


@given(st.sets(st.integers(len(HEAD), len(ANSWER) - 1), max_size=4))
def test_response_split_at_any_position_is_counted_once(places):
    loop, connection = answering()
    feed(loop, connection, cut(ANSWER, places))
    assert (loop.tally.answers, loop.tally.bad) == (1, 0)
    assert loop.tally.completion_tokens == 3
    assert 3 - len(places) <= loop.tally.events <= 3, "a cut may hide the marker it goes through, and only that one"


@given(st.sets(st.integers(1, len(HEAD) - 1), max_size=3))
def test_response_head_split_at_any_position_is_parsed(places):
    loop, connection = answering()
    feed(loop, connection, cut(ANSWER, places))
    assert (loop.tally.answers, loop.tally.bad, loop.tally.events) == (1, 0, 3)


def test_next_request_is_sent_on_the_same_connection_after_the_response():
    loop, connection = answering()
    feed(loop, connection, [ANSWER])
    assert connection.sock.sent == [b"request", b"request"]


def test_role_event_is_not_counted_as_a_token():
    loop, connection = answering()
    feed(loop, connection, [HEAD + chunk(delta("")), chunk(delta("one"))])
    assert loop.tally.events == 1
    assert loop.tally.ttft_s == [pytest.approx(2.0)]


def test_time_to_first_token_and_gaps_are_measured_from_receipts():
    loop, connection = answering()
    feed(loop, connection, [HEAD, chunk(delta("one")), chunk(delta("two")) + chunk(delta("three"))])
    assert loop.tally.ttft_s == [pytest.approx(2.0)]
    assert loop.tally.gaps_s == [pytest.approx(1.0)]
    assert loop.tally.gaps_zero == 1


def test_response_of_the_wrong_length_is_counted_as_bad():
    loop, connection = answering(replace(LOAD, completion_tokens=4))
    feed(loop, connection, [ANSWER])
    assert (loop.tally.answers, loop.tally.bad) == (0, 1)
    assert "3 completion tokens" in loop.tally.bad_example


def test_error_status_is_counted_as_bad_with_its_message():
    body = b'{"error":{"message":"no such model"}}'
    loop, connection = answering()
    feed(loop, connection, [b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body), body])
    assert loop.tally.bad == 1
    assert "404" in loop.tally.bad_example
    assert "no such model" in loop.tally.bad_example


def test_events_outside_the_window_are_not_counted():
    loop, connection = answering()
    loop.is_measuring = False
    feed(loop, connection, [ANSWER])
    assert loop.tally == Tally()


@pytest.mark.parametrize(
    ("head", "meaning"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", (200, CHUNKED)),
        (b"HTTP/1.1 503 Busy\r\nServer: x\r\ncontent-length: 12", (503, 12)),
        (b"HTTP/1.1 200 OK\r\nServer: x", (200, UNTIL_CLOSED)),
    ],
)
def test_response_head_determines_the_body_length(head, meaning):
    assert read_head(head) == meaning


def test_last_usage_of_a_response_is_counted():
    early = b'"usage":{"prompt_tokens":9,"completion_tokens":1}'
    assert read_tokens(early + b'"usage": {"prompt_tokens": 9, "completion_tokens": 2}') == (9, 2)
    assert read_tokens(b"nothing") == (-1, -1)


@given(st.lists(st.integers(0, 4**6 - 1), min_size=2, max_size=40, unique=True))
def test_different_numbers_are_spelled_differently(numbers):
    words = [b"a", b"b", b"c", b"d"]
    assert len({spell(number, words, 6) for number in numbers}) == len(numbers)


def test_consecutive_nonces_differ_in_their_first_word():
    requests = Requests([(b"<", b">")], [b"aa", b"bb", b"cc"], 2)
    assert [requests.next() for _ in range(4)] == [b"<aaaa>", b"<bbaa>", b"<ccaa>", b"<aabb>"]


def test_request_is_complete_and_its_prompt_starts_with_the_nonce():
    requests = build_requests(LOAD, "tiny", ["the \u00e9nd"], [" able", " zero"])
    head, _, body = requests.next().partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    sent = json.loads(body)
    assert sent["messages"] == [{"role": "user", "content": " able able able ablethe \u00e9nd"}]
    assert sent["max_tokens"] == 3
    assert sent["stream_options"] == {"include_usage": True}


def test_nonce_words_of_different_length_are_refused():
    with pytest.raises(ConfigError, match="one length"):
        build_requests(LOAD, "tiny", ["text"], [" a", " bb"])


def test_quantiles_include_unlisted_zeros():
    assert quantiles([], 0) == {}
    assert quantiles([0.004], 3) == {"mean": 1.0, "p50": 0.0, "p90": 4.0, "p99": 4.0, "max": 4.0}


@given(st.lists(st.floats(0.001, 1.0), max_size=30), st.integers(0, 30))
def test_quantiles_equal_those_of_the_full_list(values, zeros):
    ordered = sorted(values + [0.0] * zeros)
    found = quantiles(values, zeros)
    if ordered:
        assert found["p50"] == pytest.approx(ordered[int(0.5 * len(ordered))] * 1e3)
        assert found["max"] == pytest.approx(ordered[-1] * 1e3)


def test_process_family_contains_all_descendants():
    assert family([2], {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}) == [2, 3, 4]


def test_report_divides_processor_time_by_tokens():
    before = Snapshot(10.0, {"frontend": Usage(1.0, 0, 0.5)}, 0.5, {8: 1.0})
    after = Snapshot(12.0, {"frontend": Usage(1.5, 2**21, 0.6)}, 0.6, {8: 1.2, 9: 7.0})
    tally = Tally(answers=4, events=500, receives=100, completion_tokens=400, answered_events=200)
    report = Report.of(LOAD, tally, before, after, 0)
    assert report.tokens == 1000
    assert report.requests == 10
    assert report.costs["frontend"].us_per_token == pytest.approx(500)
    assert report.costs["frontend"].us_per_request == pytest.approx(50_000)
    assert report.costs["frontend"].kernel_us_per_token == pytest.approx(100)
    assert report.costs["frontend"].rss_mib == 2
    assert report.own_us_per_token == pytest.approx(100)
    assert report.noise == pytest.approx(0.1), "a process that is new began before it was first seen"


def test_window_without_tokens_has_no_cost_per_token():
    snapshot = Snapshot(1.0, {"frontend": Usage()}, 0.0, {})
    report = Report.of(LOAD, Tally(), snapshot, replace(snapshot, at=2.0), 1)
    assert math.isnan(report.costs["frontend"].us_per_token)


def test_command_line_groups_processes_by_name():
    config = load(LoadgenConfig, ["--watch", "frontend:1+2,engine:3", "--completions"], {})
    assert config.groups() == {"frontend": [1, 2], "engine": [3]}
    assert config.load().path == "/v1/completions"
    with pytest.raises(ConfigError, match="NAME:PID"):
        load(LoadgenConfig, ["--watch", "frontend"], {})
