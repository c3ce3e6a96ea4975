"""The bundled model through every layer: the sampling options of a request take effect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "What is a worker?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cpu")) as cluster:
        cluster.run("cpu", "--model-name", "demo")
        wait_until(lambda: cluster.workers() == 1, "the worker never appeared")
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return cluster.openai()


def text(client: openai.OpenAI, **options: Any) -> str:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, **options)
    return answer.choices[0].message.content or ""


def test_greedy_text_is_equal_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = text(client, temperature=0)
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True)
    assert whole
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_seed_determines_the_text(client: openai.OpenAI) -> None:
    options: Any = {"temperature": 2.0, "max_tokens": 24}
    first = text(client, seed=5, **options)
    assert text(client, seed=5, **options) == first
    assert any(text(client, seed=seed, **options) != first for seed in range(6, 10))


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = text(client, temperature=0)
    stop = whole[len(whole) // 2 :][:3]
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stop=stop)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_have_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3, max_tokens=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    joined = b"".join(bytes(one.bytes or []) for one in logprobs.content)
    assert joined.decode() == answer.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob
        assert one.logprob <= 0


def test_several_choices_of_one_request_are_counted_together(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, n=3, temperature=1.5, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18


def test_echo_returns_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["A worker", "A block"], echo=True, max_tokens=3)
    first, second = (choice.text for choice in answer.choices)
    assert first.startswith("A worker")
    assert second.startswith("A block")


def test_repeated_prefix_is_counted_as_cached(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Answer briefly. " * 20}, {"role": "user", "content": "Hello"}]
    usages = [client.chat.completions.create(model="demo", messages=messages, max_tokens=2).usage for _ in range(2)]
    assert usages[1] is not None
    assert usages[1].prompt_tokens_details is not None
    assert (usages[1].prompt_tokens_details.cached_tokens or 0) > 0


def test_token_with_negative_bias_is_not_generated(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, logprobs=True, max_tokens=1)
    assert answer.choices[0].logprobs is not None
    first = (answer.choices[0].logprobs.content or [])[0].model_extra or {}
    banned = text(client, temperature=0, max_tokens=1, logit_bias={str(first["token_id"]): -100})
    assert banned != answer.choices[0].message.content


def test_min_tokens_delays_the_end_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=80, extra_body={"min_tokens": 70}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 70


# ---- log-probabilities of the prompt, over plain HTTP ----------------------------------------------------------------

PROMPT = "A worker is a process that runs an engine and answers requests. 12 + 30 = 42"


def completion(cluster: Cluster, **fields: Any) -> Any:
    """Return the body of a response to `POST /v1/completions`."""
    answer = cluster.http.post("/v1/completions", json={"model": "demo", "prompt": PROMPT, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def reference() -> tuple[list[int], Any]:
    """Return the prompt's tokens, and the log-probabilities that transformers computes for each of them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        return ids, torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def test_echo_with_logprobs_scores_the_prompt_as_transformers_does(
    cluster: Cluster, reference: tuple[list[int], Any]
) -> None:
    ids, want = reference
    for requested in (PROMPT, ids, ids):  # The second and the third find the prompt in the prefix cache.
        body = completion(cluster, prompt=requested, echo=True, logprobs=2, max_tokens=1)
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert "".join(logprobs["tokens"][:-1]) == PROMPT
        assert len(logprobs["tokens"]) == len(ids) + 1
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:at])) for at in range(len(ids) + 1)]
        for at, token in enumerate(ids[1:], start=1):
            assert logprobs["token_logprobs"][at] == pytest.approx(float(want[at - 1, token]), abs=2e-3)
            top = list(logprobs["top_logprobs"][at].values())
            assert sorted(top, reverse=True) == pytest.approx(sorted(want[at - 1].tolist())[:-3:-1], abs=2e-3)
            if int(want[at - 1].argmax()) == token:
                assert logprobs["token_logprobs"][at] == max(top)


def test_echo_with_logprobs_lists_the_stop_token(cluster: Cluster) -> None:
    prompt = "A worker is a process that runs an engine and answers requests."
    body = completion(cluster, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "stop"), "the model ends the text here"
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"] + 1
    assert "".join(choice["logprobs"]["tokens"][:-1]) == prompt


def test_echo_of_no_tokens_is_the_scored_prompt(cluster: Cluster, reference: tuple[list[int], Any]) -> None:
    ids, _ = reference
    body = completion(cluster, echo=True, logprobs=1, max_tokens=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert body["usage"]["completion_tokens"] == 0
    longer = completion(cluster, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]["token_logprobs"]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(longer[1:-1], abs=1e-3)


def test_prompt_logprobs_are_reported_for_chats_and_completions(
    cluster: Cluster, reference: tuple[list[int], Any]
) -> None:
    ids, want = reference
    body = completion(cluster, prompt=[PROMPT, PROMPT], prompt_logprobs=3, max_tokens=1, n=2)
    assert len(body["choices"]) == 4
    for choice in body["choices"]:
        rows = choice["prompt_logprobs"]
        assert (rows[0], len(rows)) == (None, len(ids))
        for at, token in enumerate(ids[1:], start=1):
            own = rows[at][str(token)]
            assert own["logprob"] == pytest.approx(float(want[at - 1, token]), abs=2e-3)
            assert own["rank"] == 1 + int((want[at - 1] > want[at - 1, token]).sum())
            assert {one["rank"] for one in rows[at].values()} >= {1, 2, 3}
            assert len(rows[at]) in (3, 4)
    answer = cluster.http.post(
        "/v1/chat/completions", json={"model": "demo", "messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 2}
    ).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [next(iter(row.values()))["decoded_token"] for row in answer["prompt_logprobs"][2:4]] == ["\n", "What"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": False, "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ],
)
def test_unsupported_scores_are_refused_by_name(cluster: Cluster, fields: dict[str, Any], param: str) -> None:
    answer = cluster.http.post("/v1/completions", json={"model": "demo", "prompt": PROMPT, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_mocker_refuses_prompt_logprobs_by_name(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.mocker("--model-path", DEMO_MODEL)
        for fields in (
            {"prompt_logprobs": 1},
            {"echo": True, "logprobs": 1},
            {"echo": True, "logprobs": 1, "max_tokens": 0},
        ):
            answer = cluster.http.post(
                "/v1/completions", json={"model": "m", "prompt": "Hi", "max_tokens": 2, **fields}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
            assert "prompt_logprobs" in answer.json()["message"]
