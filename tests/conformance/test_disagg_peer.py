"""Prefill and decode: both frontends send the same two legs, and ours works with released mockers in both roles."""

import http.client
import json
import os
import subprocess
import sys
import time
from contextlib import closing

import pytest
from benchmarks.peer import is_ready, peer_home, peer_python
from benchmarks.stacks import HOST, free_port, stack_environment

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.conformance

READY_S = 90.0
CHAT = "/v1/chat/completions"
CAPTURE = os.path.join(os.path.dirname(__file__), "peer_disagg_worker.py")
USER = {"role": "user", "content": "Tell me about many things, long and short, near and far."}
IDS = {"prefill_worker_id", "decode_worker_id"}

ASKED = {
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


class Stand:
    """Frontends of both houses, or ours alone, and the workers behind them."""

    def __init__(self, home, mode, houses=("ours", "theirs")):
        self.home = home
        self.records = home / "records.jsonl"
        self.records.touch()
        self.meets = False
        """Whether both legs are sent at once, or could be."""
        (home / "discovery").mkdir()
        self.ports = {house: free_port() for house in houses}
        self.processes = []
        for house, port in self.ports.items():
            python = sys.executable if house == "ours" else peer_python()
            listen = ["--http-host", HOST, "--http-port", str(port), "--router-mode", mode]
            self.start([python, "-m", "dynamo.frontend", *listen])

    def start(self, command):
        env = stack_environment(str(self.home), dict(os.environ))
        with open(self.home / f"{len(self.processes)}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def capture(self, *bootstrap):
        self.meets = bool(bootstrap)
        for role in ("prefill", "decode"):
            more = bootstrap if role == "prefill" else ()
            self.start([peer_python(), CAPTURE, DEMO_MODEL, "m", str(self.records), role, *more])
        return self.wait()

    def wait(self):
        """Returns when both legs of a request work through every frontend."""
        for house in self.ports:
            deadline = time.monotonic() + READY_S
            while True:
                try:
                    status, answer = self.ask(house, {"max_tokens": 2})
                except (OSError, http.client.HTTPException) as error:
                    status, answer = 0, error
                if status == 200:
                    break
                assert time.monotonic() < deadline, f"{house} was not ready in {READY_S:g} s: {answer}"
                time.sleep(0.2)
        return self

    def ask(self, house, body):
        with closing(http.client.HTTPConnection(HOST, self.ports[house], timeout=30)) as connection:
            data = json.dumps({"model": "m", "messages": [USER], **body}).encode()
            connection.request("POST", CHAT, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def legs(self, house, body):
        """What both workers were asked; the prefill's leg first, whichever came first."""
        before = len(self.records.read_text().splitlines())
        status, answer = self.ask(house, body)
        assert status == 200, answer
        lines = [json.loads(line) for line in self.records.read_text().splitlines()[before:]]
        assert len({line["id"] for line in lines}) == 1, "both legs have the request's id"
        lines.sort(key=lambda line: line["role"], reverse=True)
        meetings = [line["request"].get("bootstrap_info") for line in lines]
        assert all(meeting == meetings[0] for meeting in meetings)
        return [(line["role"], settled(line["request"])) for line in lines], answer

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def settled(request):
    """A request without what differs from one to the next, or is meant to (test_requests_peer.py)."""
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


@pytest.fixture(scope="module", params=["round-robin", "kv", "power-of-two", "round-robin+", "kv+"])
def stand(request, tmp_path_factory):
    """Both frontends before released workers that write down what they are asked; + with a place to meet."""
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    mode, plus, _ = request.param.partition("+")
    stand = Stand(tmp_path_factory.mktemp("disagg"), mode)
    try:
        yield stand.capture(*(["18999"] if plus else []))
    finally:
        stand.stop()


@pytest.mark.parametrize("name", ASKED)
def test_both_legs_are_the_same(stand, name):
    ours, told = stand.legs("ours", ASKED[name])
    theirs, expected = stand.legs("theirs", ASKED[name])
    assert [role for role, _ in ours] == ["prefill", "decode"]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        assert one == other
        assert list(one) == list(other), "the fields have their order"
    assert (told["choices"], told["usage"]) == (expected["choices"], expected["usage"])
    assert told.get("nvext", {}).get("worker_id") == expected.get("nvext", {}).get("worker_id")
    if name == "extras":
        assert told["nvext"]["timing"].keys() == expected["nvext"]["timing"].keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_failed_prefill_is_told_the_same(stand, name):
    if stand.meets:
        pytest.skip("the decode worker of this stand waits for no blocks, and may have answered already")
    body = {"nvext": {"annotations": [f"prefill_fails:{REFUSED[name]}"]}}
    (ours, told), (theirs, expected) = stand.ask("ours", body), stand.ask("theirs", body)
    assert (ours, told["message"]) == (theirs, expected["message"])
    assert ours != 200


def test_a_prefill_that_ends_the_text_is_all_of_it(stand):
    if stand.meets:
        pytest.skip("decode was sent already")
    body = {"nvext": {"annotations": ["prefill_ends:stop"], "extra_fields": ["worker_id"]}}
    (_, told), (_, expected) = stand.ask("ours", body), stand.ask("theirs", body)
    assert told["choices"] == expected["choices"]
    assert told["nvext"] == expected["nvext"]


def test_released_prefill_worker_is_stopped_when_the_client_leaves(stand):
    before = len(stand.records.read_text().splitlines())
    connection = http.client.HTTPConnection(HOST, stand.ports["ours"], timeout=30)
    body = {"model": "m", "messages": [USER], "nvext": {"annotations": ["prefill_hangs:20"]}}
    connection.request("POST", CHAT, json.dumps(body).encode(), {"content-type": "application/json"})
    wait_for_lines(stand, before, lambda line: line["role"] == "prefill")
    connection.close()
    (line,) = wait_for_lines(stand, before, lambda line: "stopped" in line)
    assert line["stopped"] is True
    assert stand.ask("ours", {"max_tokens": 2})[0] == 200


def wait_for_lines(stand, before, matches):
    """Return the recorded requests that match, as soon as there is one."""
    deadline = time.monotonic() + 10
    while True:
        lines = [json.loads(line) for line in stand.records.read_text().splitlines()[before:]]
        if found := [line for line in lines if matches(line)]:
            return found
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)


def test_the_model_is_ready_in_both_roles(stand):
    answers = {}
    for house, port in stand.ports.items():
        with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
            connection.request("GET", "/v1/models/m/ready")
            answers[house] = json.loads(connection.getresponse().read())
    assert answers["ours"] == answers["theirs"]


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
@pytest.mark.parametrize("meets", [False, True])
def test_released_mockers_answer_in_both_roles(tmp_path, mode, meets):
    if not is_ready():
        pytest.skip(f"the released peer is not installed in {peer_home()}: python -m benchmarks.peer")
    stand = Stand(tmp_path, mode, ("ours",))
    try:
        for role in ("prefill", "decode"):
            port = ["--bootstrap-ports", str(free_port())] if meets and role == "prefill" else []
            flags = ["--disaggregation-mode", role, "--speedup-ratio", "0", "--discovery-backend", "file", *port]
            stand.start([peer_python(), "-m", "dynamo.mocker", "--model-path", DEMO_MODEL, "--model-name", "m", *flags])
        stand.wait()
        for _ in range(8):
            status, answer = stand.ask("ours", {"max_tokens": 7, "nvext": {"extra_fields": ["worker_id"]}})
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 7
            ids = answer["nvext"]["worker_id"]
            assert ids.keys() >= IDS
            assert len({ids[name] for name in IDS}) == 2
    finally:
        stand.stop()
