"""Embeddings of the embedded engine: OpenAI's client, a frontend and a worker, each a process of its own."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import tokenizers
from tests.cluster.classifier import classifier
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("embeddings")) as cluster:
        cluster.run("cpu", "--model-name", "e", "--embedding-worker", "--max-num-batched-tokens", "64")
        wait_until(lambda: cluster.workers() == 1, "the worker never appeared")
        wait_until(lambda: cluster.http.get("/v1/models/e/ready").status_code == 200, "the model never appeared")
        yield cluster


def test_embedding_is_equal_for_every_encoding_and_batch(cluster: Cluster) -> None:
    client = cluster.openai()
    texts = ["What is a worker?", "a", "word " * 100]
    packed = client.embeddings.create(model="e", input=texts)
    plain = client.embeddings.create(model="e", input=texts, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-4)
    (alone,) = client.embeddings.create(model="e", input=texts[2]).data
    assert alone.embedding == pytest.approx(packed.data[2].embedding, abs=1e-4)
    short = client.embeddings.create(model="e", input=texts[0], dimensions=16)
    assert len(short.data[0].embedding) == 16
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 100


def test_token_ids_and_text_have_equal_embeddings(cluster: Cluster) -> None:
    ids = tokenizers.Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json").encode("What is a worker?").ids
    client = cluster.openai()
    text = client.embeddings.create(model="e", input="What is a worker?")
    for tokens in (ids, [ids]):
        reported = client.embeddings.create(model="e", input=tokens)
        assert reported.data[0].embedding == pytest.approx(text.data[0].embedding, abs=1e-5)
        assert reported.usage.prompt_tokens == len(ids)


def test_invalid_embedding_requests_are_refused_by_field(cluster: Cluster) -> None:
    client = cluster.openai()
    for fields in ({"dimensions": 100_000}, {"input": "word " * 5000}, {"input": [10**6]}, {"input": ""}):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.embeddings.create(**{"model": "e", "input": "a", **fields})  # type: ignore[arg-type]
        assert next(iter(fields)) in str(refusal.value)
    cut = client.embeddings.create(model="e", input="word " * 5000, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 2048
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="e", messages=[{"role": "user", "content": "Hi"}])
    assert cluster.metric("dynamo_frontend_embedding_latency_seconds_count", model="e") > 0


@pytest.mark.reference
def test_classifier_probabilities_equal_transformers(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = classifier(tmp_path / "judge")
    with Cluster(tmp_path) as cluster:
        cluster.run("cpu", "--model-path", str(model), "--classify-worker")
        wait_until(lambda: cluster.workers() == 1, "the worker never appeared")
        wait_until(lambda: cluster.http.get("/v1/models/judge/ready").status_code == 200, "the model never appeared")
        output = cluster.http.post(
            "/v1/classify", json={"model": "judge", "input": ["What is it?", "A worker."]}
        ).json()
        for place, entry in enumerate(output["data"]):
            assert (entry["index"], entry["num_classes"], sum(entry["probs"])) == (place, 2, pytest.approx(1))
            assert entry["label"] == ("question", "answer")[entry["probs"].index(max(entry["probs"]))]
        assert output["usage"]["prompt_tokens"] > 5
        judge = transformers.AutoModelForSequenceClassification.from_pretrained(str(model), dtype=torch.float32)
        ids = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json").encode("What is it?").ids
        with torch.no_grad():
            want = judge(torch.tensor([ids])).logits.softmax(-1)[0].tolist()
        assert output["data"][0]["probs"] == pytest.approx(want, abs=1e-3)
        refused = cluster.http.post("/v1/rerank", json={"model": "judge", "query": "a", "documents": ["b"]})
        assert refused.status_code == 404
