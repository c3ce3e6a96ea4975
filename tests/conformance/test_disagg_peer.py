"""Prefill and decode: both frontends send the same two requests, and ours works with released mockers in both roles."""

import http.client
import json
import os
import time
from contextlib import closing

import pytest
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, free_port
from tests.cluster.peers import PeerCluster, RecordedRequests, require_peer

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.conformance

READY_S = 90.0
CHAT = "/v1/chat/completions"
CAPTURE = os.path.join(os.path.dirname(__file__), "peer_disagg_worker.py")
USER = {"role": "user", "content": "Tell me about many things, long and short, near and far."}
IDS = {"prefill_worker_id", "decode_worker_id"}

REQUESTED = {
    "nothing special": {},
    "limits": {"max_tokens": 20, "min_tokens": 3, "stop": ["zzz"]},
    "choices": {"n": 2},
    "sampling": {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.5},
    "a short answer": {"max_tokens": 1},
    "a salt": {"cache_salt": "abc"},
    "hints": {"nvext": {"agent_hints": {"priority": 3, "osl": 50}}},
    "extras": {"nvext": {"extra_fields": ["worker_id", "timing"]}},
    "no reason": {"nvext": {"annotations": ["prefill_ends:none"]}},
}
REFUSED = {"a bad prompt": "InvalidArgument", "a bug": "Unknown"}


class DisaggregatedPeers(PeerCluster):
    """Frontends, prefill and decode workers."""

    def __init__(self, folder, mode, frontends=("ours", "theirs")):
        super().__init__(folder, "--router-mode", mode, frontends=frontends)
        self.records = RecordedRequests(folder / "records.jsonl")
        self.is_bootstrapped = False
        """Whether both phases are sent at once."""

    def start_recording_workers(self, *bootstrap):
        self.is_bootstrapped = bool(bootstrap)
        for role in ("prefill", "decode"):
            more = bootstrap if role == "prefill" else ()
            self.run([peer_python(), CAPTURE, DEMO_MODEL, "m", str(self.records.path), role, *more])
        return self.wait()

    def wait(self):
        """Return when both phases of a request work through every frontend."""
        return self.wait_answered(CHAT, {"model": "m", "messages": [USER], "max_tokens": 2})

    def chat(self, name, body):
        response = self.request(self.ports[name], "POST", CHAT, {"model": "m", "messages": [USER], **body})
        return response.status, response.json

    def phases(self, name, body):
        """Return the requests that both workers received, prefill first, and the response."""
        before = self.records.count()
        status, answer = self.chat(name, body)
        assert status == 200, answer
        if self.is_bootstrapped:  # The response may arrive before both workers have recorded their phase.
            both = {"prefill", "decode"}
            self.wait_until(
                lambda: {line.get("role") for line in self.records.since(before)} >= both, "a phase is missing"
            )
        lines = self.records.since(before)
        assert len({line["id"] for line in lines}) == 1, "both phases have the request's id"
        lines.sort(key=lambda line: line["role"], reverse=True)
        bootstraps = [line["request"].get("bootstrap_info") for line in lines]
        assert all(bootstrap == bootstraps[0] for bootstrap in bootstraps)
        return [(line["role"], settled(line["request"])) for line in lines], answer


def settled(request):
    """Return a request without its variable fields and its intended differences (test_requests_peer.py)."""
    sampling = dict(request["sampling_options"])
    for field, value in {"temperature": 0.3, "top_p": 0.9, "top_k": 20}.items():
        if sampling[field] == value:
            sampling[field] = None
    settled = {**request, "mdc_sum": None, "sampling_options": sampling}
    if "bootstrap_info" in settled:
        meeting = dict(settled["bootstrap_info"])
        assert 0 <= meeting.pop("bootstrap_room") < 2**63
        meeting["handoff_id"] = len(meeting["handoff_id"]["base64"])
        settled["bootstrap_info"] = meeting
    return settled


@pytest.fixture(scope="module", params=["round-robin", "kv", "power-of-two", "round-robin+", "kv+", "power-of-two+"])
def peers(request, tmp_path_factory):
    """Both frontends with released workers that record their requests; also with bootstrap information."""
    require_peer()
    mode, plus, _ = request.param.partition("+")
    with DisaggregatedPeers(tmp_path_factory.mktemp("disagg"), mode) as peers:
        yield peers.start_recording_workers(*(["18999"] if plus else []))


@pytest.mark.parametrize("name", REQUESTED)
def test_both_frontends_send_the_same_prefill_and_decode_requests(peers, name):
    ours, reported = peers.phases("ours", REQUESTED[name])
    theirs, expected = peers.phases("theirs", REQUESTED[name])
    assert [role for role, _ in ours] == ["prefill", "decode"]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one == other
        assert list(one) == list(other), "the fields have their order"
    assert (reported["choices"], reported["usage"]) == (expected["choices"], expected["usage"])
    assert reported.get("nvext", {}).get("worker_id") == expected.get("nvext", {}).get("worker_id")
    if name == "extras":
        assert reported["nvext"]["timing"].keys() == expected["nvext"]["timing"].keys()


@pytest.mark.parametrize("name", REFUSED)
def test_both_frontends_return_the_same_error_for_a_failed_prefill(peers, name):
    if peers.is_bootstrapped:
        pytest.skip("the decode worker of this peers waits for no blocks, and may have answered already")
    body = {"nvext": {"annotations": [f"prefill_fails:{REFUSED[name]}"]}}
    (ours, reported), (theirs, expected) = peers.chat("ours", body), peers.chat("theirs", body)
    assert (ours, reported["message"]) == (theirs, expected["message"])
    assert ours != 200


def test_response_ends_with_a_prefill_that_generates_the_last_token(peers):
    if peers.is_bootstrapped:
        pytest.skip("decode was sent already")
    body = {"nvext": {"annotations": ["prefill_ends:stop"], "extra_fields": ["worker_id"]}}
    (_, reported), (_, expected) = peers.chat("ours", body), peers.chat("theirs", body)
    assert reported["choices"] == expected["choices"]
    assert reported["nvext"] == expected["nvext"]


def test_released_prefill_worker_is_stopped_when_the_client_leaves(peers):
    before = peers.records.count()
    connection = http.client.HTTPConnection(HOST, peers.ports["ours"], timeout=30)
    body = {"model": "m", "messages": [USER], "nvext": {"annotations": ["prefill_hangs:20"]}}
    connection.request("POST", CHAT, json.dumps(body).encode(), {"content-type": "application/json"})
    wait_for_lines(peers, before, lambda line: line["role"] == "prefill")
    connection.close()
    (line,) = wait_for_lines(peers, before, lambda line: "stopped" in line)
    assert line["stopped"] is True
    assert peers.chat("ours", {"max_tokens": 2})[0] == 200


def wait_for_lines(peers, before, matches):
    """Return the matching recorded requests when there is at least one."""
    deadline = time.monotonic() + 60
    while True:
        lines = peers.records.since(before)
        if found := [line for line in lines if matches(line)]:
            return found
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)


def test_model_is_ready_with_workers_of_both_roles(peers):
    answers = {}
    for implementation, port in peers.ports.items():
        with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
            connection.request("GET", "/v1/models/m/ready")
            answers[implementation] = json.loads(connection.getresponse().read())
    assert answers["ours"] == answers["theirs"]


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
@pytest.mark.parametrize("meets", [False, True])
def test_released_mockers_serve_both_roles(tmp_path, mode, meets):
    require_peer()
    with DisaggregatedPeers(tmp_path, mode, ("ours",)) as peers:
        for role in ("prefill", "decode"):
            port = ["--bootstrap-ports", str(free_port())] if meets and role == "prefill" else []
            flags = ["--disaggregation-mode", role, "--speedup-ratio", "0", "--discovery-backend", "file", *port]
            peers.run([peer_python(), "-m", "dynamo.mocker", "--model-path", DEMO_MODEL, "--model-name", "m", *flags])
        peers.wait()
        for _ in range(8):
            status, answer = peers.chat("ours", {"max_tokens": 7, "nvext": {"extra_fields": ["worker_id"]}})
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 7
            ids = answer["nvext"]["worker_id"]
            assert ids.keys() >= IDS
            assert len({ids[name] for name in IDS}) == 2
