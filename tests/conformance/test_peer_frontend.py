"""Our frontend with the released mocker, and the released frontend with ours, over one discovery directory.

The two unmixed stacks pass the same tests: the first shows that the released system supports all that the tests
require, the second that our own two ends agree.
"""

import http.client
import json
import os
import time
from contextlib import closing

import pytest
from benchmarks.corpus import bench_model, read_prompts, render
from benchmarks.loadgen import Load, build_requests, measure
from benchmarks.peer import peer_python
from benchmarks.stacks import HOST, MODEL_NAME, Recipe, Stack, StackFailed, ours, theirs
from tests.cluster.peers import require_peer
from tokenizers import Tokenizer

pytestmark = pytest.mark.conformance

QUESTION = "How many items are there?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PAIRS = ["theirs-theirs", "theirs-ours", "ours-theirs", "ours-ours"]
GONE_TIMEOUT_S = 60.0  # A record outlives its owner by about ten seconds unless it is removed.


@pytest.fixture(scope="module")
def implementations():
    require_peer()
    return {"ours": ours(), "theirs": theirs(peer_python())}


def recipe(implementations, pair, **more):
    frontend, engine = (implementations[name] for name in pair.split("-"))
    return Recipe(name=pair, frontend=frontend, engine=engine, **more)


@pytest.fixture(scope="module", params=PAIRS)
def stack(request, implementations):
    try:
        with Stack(recipe(implementations, request.param), bench_model()) as running:
            yield running
    except StackFailed as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(os.path.join(bench_model(), "tokenizer.json"))


def post(stack, path, **body):
    status, answer = stack.send_request("POST", path, {"model": MODEL_NAME, **body})
    return status, answer


def stream(stack, path, **body):
    """Return the decoded events of one stream; the last must be [DONE]."""
    body = {"model": MODEL_NAME, "stream": True, "stream_options": {"include_usage": True}, **body}
    with closing(http.client.HTTPConnection(HOST, stack.port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    assert response.status == 200, text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(part) for part in data[:-1]]


def usage_counts(usage):
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def test_chat_response_has_exact_usage(stack, tokenizer):
    status, answer = post(stack, "/v1/chat/completions", messages=MESSAGES, max_tokens=24)
    assert status == 200, answer
    prompt = len(tokenizer.encode(render(QUESTION)).ids)
    assert usage_counts(answer["usage"]) == (prompt, 24, prompt + 24)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert answer["object"] == "chat.completion"


def test_chat_stream_has_exact_usage(stack, tokenizer):
    events = stream(stack, "/v1/chat/completions", messages=MESSAGES, max_tokens=24)
    prompt = len(tokenizer.encode(render(QUESTION)).ids)
    assert usage_counts(events[-1]["usage"]) == (prompt, 24, prompt + 24)
    assert events[-1]["choices"] == []
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]
    assert choices[0]["delta"]["role"] == "assistant"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_completion_response_has_exact_usage(stack, tokenizer):
    status, answer = post(stack, "/v1/completions", prompt=QUESTION, max_tokens=24)
    assert status == 200, answer
    prompt = len(tokenizer.encode(QUESTION).ids)
    assert usage_counts(answer["usage"]) == (prompt, 24, prompt + 24)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    assert answer["object"] == "text_completion"


def test_completion_stream_has_exact_usage(stack, tokenizer):
    events = stream(stack, "/v1/completions", prompt=QUESTION, max_tokens=24)
    prompt = len(tokenizer.encode(QUESTION).ids)
    assert usage_counts(events[-1]["usage"]) == (prompt, 24, prompt + 24)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]


def test_response_of_one_token_has_one_token(stack):
    events = stream(stack, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert events[-1]["usage"]["completion_tokens"] == 1


def test_usage_is_exact_for_sixteen_connections_with_500_token_prompts(stack):
    prompts = read_prompts(bench_model(), 512)
    load = Load(
        host=HOST,
        port=stack.port,
        concurrency=16,
        warmup_s=0.3,
        window_s=4.0,
        prompt_tokens=512,
        completion_tokens=64,
    )
    report = measure(load, build_requests(load, MODEL_NAME, prompts.texts, prompts.words), stack.pids)
    assert report.bad == 0, report.bad_example
    assert report.unanswered == 0
    assert report.answers >= 16


def test_unknown_model_is_not_found(stack):
    status, _ = stack.send_request(
        "POST", "/v1/chat/completions", {"model": "no-such-model", "messages": MESSAGES, "max_tokens": 2}
    )
    assert status == 404


def test_request_refused_by_the_mocker_is_a_client_error(stack):
    status, answer = post(stack, "/v1/chat/completions", messages=MESSAGES)
    assert status == 400, answer
    assert "max_output_tokens" in json.dumps(answer)


def test_frontend_lists_the_discovered_worker(stack):
    status, health = stack.send_request("GET", "/health")
    assert status == 200
    generate = [instance for instance in health["instances"] if instance["endpoint"] == "generate"]
    assert [instance["component"] for instance in generate] == ["backend"]
    assert generate[0]["transport"]["tcp"].startswith(f"{HOST}:")


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_disconnected_client_does_not_affect_other_requests(implementations, pair):
    with Stack(recipe(implementations, pair, speedup=1.0), bench_model()) as paced:
        body = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 4000, "stream": True}
        for _ in range(3):
            with closing(http.client.HTTPConnection(HOST, paced.port, timeout=60)) as connection:
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                assert connection.getresponse().read(64)
        status, answer = post(paced, "/v1/chat/completions", messages=MESSAGES, max_tokens=4)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_stopped_worker_is_not_listed(implementations, pair):
    with Stack(recipe(implementations, pair), bench_model()) as running:
        running.end_engines()
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (listed := running.send_request("GET", "/v1/models")[1]["data"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert listed == []
