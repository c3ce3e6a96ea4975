"""Frontend as seen by clients: real processes, mocker workers, valid and invalid requests."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.cluster.worker import WorkerProcess

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PACED = ("--speedup-ratio", "1")
ENDLESS = ("--speedup-ratio", "0.0001")  # Prefill takes 165 s: no request has a token before the end of the test.
SLOW = ("--decode-speedup-ratio", "0.02")  # A token takes 0.3 s.
QUICK = ("--speedup-ratio", "0")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a frontend and a mocker that answers at once."""
    with Cluster(tmp_path_factory.mktemp("fast")) as cluster:
        cluster.mocker("--speedup-ratio", "0", "--max-model-len", "512")
        yield cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start a frontend without workers, for one test."""
    with Cluster(tmp_path) as cluster:
        wait_until(lambda: cluster.frontend.poll() is None and cluster.is_live(), "the frontend never came up")
        yield cluster


BAD = {
    "no JSON": b"{nope",
    "nothing": b"",
    "a list": b"[]",
    "broken UTF-8": b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a lone surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    "very deep": b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a wrong type": json.dumps({**CHAT, "max_tokens": "four"}).encode(),
    "no messages": json.dumps({**CHAT, "messages": []}).encode(),
    "no model": json.dumps({"messages": CHAT["messages"]}).encode(),
    "a wrong role": json.dumps({**CHAT, "messages": [{"role": "wizard", "content": "x"}]}).encode(),
    "zero tokens": json.dumps({**CHAT, "max_tokens": 0}).encode(),
    "a hot temperature": json.dumps({**CHAT, "temperature": 3}).encode(),
    "a huge number": json.dumps({**CHAT, "max_tokens": 10**30}).encode(),
    "an unknown field": json.dumps({**CHAT, "surprise": 1}).encode(),
    "stream options without a stream": json.dumps({**CHAT, "stream_options": {"include_usage": True}}).encode(),
    "an over-long prompt": json.dumps({**CHAT, "messages": [{"role": "user", "content": "long " * 2000}]}).encode(),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_request_returns_400_with_a_message(fast: Cluster, name: str, stream: bool) -> None:
    body = BAD[name]
    if stream and body.startswith(b'{"') and name != "stream options without a stream":
        body = b'{"stream":true,' + body[1:]
    answer = fast.post(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"]
    assert answer.json()["message"] == error["message"]


def test_unknown_model_is_a_404_that_lists_the_served_models(fast: Cluster) -> None:
    answer = fast.post({**CHAT, "model": "other"})
    assert answer.status_code == 404
    assert "'other'" in answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="other"):
        fast.openai().chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


def test_unknown_route_and_wrong_method_are_json_errors(fast: Cluster) -> None:
    assert fast.http.get("/nowhere").json()["error"]["message"] == "Route not found: GET /nowhere"
    assert fast.http.get("/v1/chat/completions").status_code == 405
    assert fast.http.get("/v1/chat/completions").json()["error"]["message"]


def test_body_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.processes[0].terminate()
        cluster.processes[0].wait(DEADLINE_S)
        cluster.run(
            "frontend", "--http-host", "127.0.0.1", "--http-port", str(cluster.port), DYN_HTTP_BODY_LIMIT_MB="1"
        )
        wait_until(cluster.is_live, "the frontend never came up")
        client = socket.create_connection(("127.0.0.1", cluster.port), timeout=DEADLINE_S)
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        client.close()


def test_streamed_and_whole_responses_have_equal_usage(fast: Cluster) -> None:
    client = fast.openai()
    messages: Any = [{"role": "user", "content": "Count with me"}]
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=9)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (9, "length")
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"


def test_each_prompt_of_a_batch_has_a_choice(fast: Cluster) -> None:
    answer = fast.openai().completions.create(model="m", prompt=["one", "two", "three"], max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_request_ids_are_returned(fast: Cluster) -> None:
    mine = "0f5c7c2e-4b1d-4f53-8f3b-1d7ab8a1a111"
    answer = fast.http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc", "x-dynamo-request-id": mine}
    )
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json()["id"] == f"chatcmpl-{mine}"


def test_annotations_precede_the_first_chunk(fast: Cluster) -> None:
    body = {**CHAT, "stream": True, "nvext": {"annotations": ["request_id", "token_ids"]}}
    text = fast.post(body).text
    assert text.startswith("event: request_id\n: ")
    assert text.index("event: token_ids\n") < text.index("data: ")


def test_openapi_documents_are_served(fast: Cluster) -> None:
    document = fast.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/live", "/metrics"} <= set(
        document["paths"]
    )
    model = fast.http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["context_window"]) == ("m", "model", 512)
    assert fast.http.get("/v1/models/m").json()["id"] == "m"
    assert fast.http.get("/v1/models/m/ready").json()["ready"] is True
    assert fast.http.get("/v1/models/x").status_code == 404


def test_metrics_equal_the_sum_of_requests(fast: Cluster) -> None:
    name = "dynamo_frontend_requests_total"
    labels = {"model": "m", "endpoint": "chat_completions", "status": "success"}
    before = fast.metric(name, **labels)
    tokens = fast.metric("dynamo_frontend_output_tokens_total", model="m")
    assert fast.post(CHAT).status_code == 200
    assert fast.metric(name, **labels) == before + 1
    assert fast.metric("dynamo_frontend_output_tokens_total", model="m") == tokens + 4
    assert fast.metric("dynamo_frontend_inflight_requests", model="m") == 0


def test_disconnected_client_stops_the_engine(cluster: Cluster) -> None:
    cluster.mocker(*PACED, "--max-num-seqs", "1")
    body = json.dumps({**CHAT, "max_tokens": 100_00, "stream": True}).encode()
    client = cluster.connect(body)
    assert b"200 OK" in client.recv(4096)
    client.close()
    wait_until(lambda: cluster.metric("dynamo_frontend_model_cancellation_total", model="m") == 1, "never cancelled")
    # With one slot, the next request is answered only if the engine has released the first one.
    assert cluster.post(CHAT).status_code == 200
    assert cluster.metric("dynamo_frontend_inflight_requests", model="m") == 0


def test_client_disconnected_before_the_first_token_stops_the_engine(cluster: Cluster) -> None:
    cluster.mocker(*ENDLESS, "--max-num-seqs", "1")
    client = cluster.connect(json.dumps({**CHAT, "max_tokens": 10_000}).encode())
    wait_until(lambda: cluster.metric("dynamo_frontend_queued_requests", model="m") == 1, "never accepted")
    client.close()
    wait_until(lambda: cluster.metric("dynamo_frontend_inflight_requests", model="m") == 0, "never dropped")


def lose_worker(cluster: Cluster, *flags: str, max_tokens: int, has_tokens: bool) -> list[httpx.Response]:
    """Kill a worker with such flags while it has half of eight requests, and return the responses.

    The other worker answers its own half at once, so that the victim's requests are all that is left at the kill. All or none
    of them have a token.
    """
    victim = cluster.mocker(*flags)
    cluster.mocker(*QUICK)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(cluster.post, {**CHAT, "max_tokens": max_tokens}) for _ in range(8)]

        def is_half_answered() -> bool:
            left = sum(not answer.done() for answer in answers)  # Fewer than four if the machine suspended the victim.
            without_token = cluster.metric("dynamo_frontend_queued_requests", model="m")
            return 0 < left <= 4 and without_token == (0 if has_tokens else left)

        wait_until(is_half_answered, "the victim does not have half of the requests")
        victim.send_signal(signal.SIGKILL)
        return [answer.result() for answer in answers]


def test_killed_worker_loses_no_unstarted_request(cluster: Cluster) -> None:
    answers = lose_worker(cluster, *ENDLESS, max_tokens=4, has_tokens=False)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert cluster.metric("dynamo_frontend_model_migration_total", model="m") > 0


def test_killed_worker_loses_no_response_that_is_not_streamed(cluster: Cluster) -> None:
    answers = lose_worker(cluster, *SLOW, max_tokens=200, has_tokens=True)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [200] * 8
    assert cluster.metric("dynamo_frontend_model_migration_total", model="m") > 0


def test_stream_of_a_killed_worker_ends_with_an_error(cluster: Cluster) -> None:
    worker = cluster.mocker(*SLOW)
    client = cluster.connect(json.dumps({**CHAT, "max_tokens": 1000, "stream": True}).encode())
    received = client.recv(65536)
    worker.send_signal(signal.SIGKILL)
    while b"[DONE]" not in received:
        more = client.recv(65536)
        assert more, "the connection broke without an end"
        received += more
    assert b'data: {"error":' in received
    client.close()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_stream_survives_its_worker_with_migration(tmp_path: Path, sign: signal.Signals) -> None:
    with Cluster(tmp_path, "--migration-limit", "3") as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        workers = [WorkerProcess(cluster, module="cpu") for _ in range(2)]
        body = {**CHAT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        whole = cluster.post(body).json()
        client = cluster.connect(
            json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        )
        received = client.recv(4096)
        victim = next(worker.process for worker in workers if worker.inflight)
        victim.send_signal(sign)
        while b"[DONE]" not in received:
            more = client.recv(65536)
            assert more, "the connection broke"
            received += more
        client.close()
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
        assert text == whole["choices"][0]["message"]["content"]
        assert events[-1]["usage"]["completion_tokens"] == 1500
        moves = cluster.metric("dynamo_frontend_model_migration_total", migration_type="ongoing_request")
        # A stopping worker drains: it may complete the stream itself.
        assert moves == 1 if sign is signal.SIGKILL else victim.wait(DEADLINE_S) == 0


def test_requests_are_rejected_while_every_worker_is_busy(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--active-decode-blocks-threshold", "0.01") as cluster:
        wait_until(cluster.is_live, "the frontend never came up")
        cluster.mocker(*PACED, "--num-gpu-blocks-override", "100")
        client = cluster.connect(json.dumps({**CHAT, "max_tokens": 5000, "stream": True}).encode())
        wait_until(lambda: cluster.post(CHAT).status_code == 529, "never rejected")
        rejected = cluster.post({**CHAT, "stream": True})
        assert rejected.status_code == 529
        assert rejected.headers["retry-after"]
        assert "--active-decode-blocks-threshold" in rejected.json()["error"]["message"]
        assert cluster.metric("dynamo_frontend_model_rejection_total", model="m") >= 2
        raised = {"model": "m", "active_decode_blocks_threshold": 0.9}
        assert cluster.http.post("/busy_threshold", json=raised).status_code == 200
        assert cluster.http.get("/busy_threshold").json()["thresholds"][0]["active_decode_blocks_threshold"] == 0.9
        assert cluster.post(CHAT).status_code == 200
        client.close()


def test_thresholds_are_set_for_known_models_only(fast: Cluster) -> None:
    unknown = fast.http.post("/busy_threshold", json={"model": "x", "active_prefill_tokens_threshold": 1})
    assert unknown.status_code == 404
    assert unknown.json() == {"error": "Model 'x' not found. Thresholds can only be set for discovered models."}
    for name, bad, status in (
        ("active_decode_blocks_threshold", 2, 400),
        ("active_prefill_tokens_threshold", "x", 422),
        ("active_prefill_tokens_threshold", -1.0, 422),
    ):
        assert fast.http.post("/busy_threshold", json={"model": "m", name: bad}).status_code == status


def test_model_without_workers_is_removed_and_returns(cluster: Cluster) -> None:
    first = cluster.mocker(*PACED)
    first.terminate()
    first.wait(DEADLINE_S)
    wait_until(lambda: cluster.post(CHAT).status_code == 404, "the model stayed")
    cluster.mocker(*PACED)
    assert cluster.post(CHAT).status_code == 200


def test_drain_finishes_requests_and_refuses_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", str(DEADLINE_S))
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.mocker(*SLOW)
        answer = pool.submit(cluster.post, {**CHAT, "max_tokens": 30})
        wait_until(lambda: cluster.metric("dynamo_frontend_inflight_requests", model="m") == 1, "never accepted")
        cluster.frontend.terminate()
        assert answer.result().status_code == 200
        assert cluster.frontend.wait(DEADLINE_S) == 0


def test_occupied_port_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port],
            capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: --http-port {port}: ")
    assert ended.stderr.count("\n") == 1


def test_unknown_flag_suggests_the_nearest() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dynamo.frontend", "--http-prot", "1"],
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "did you mean --http-port?" in ended.stderr
