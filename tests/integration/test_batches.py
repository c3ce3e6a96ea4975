"""Files and batches: a real frontend, OpenAI's own client, and a frontend that is killed during a batch."""

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
"""Request that takes a second."""


class BatchCluster(Cluster):
    """A frontend with a directory of batches."""

    def __init__(self, folder: Path, *frontend: str) -> None:
        super().__init__(folder, "--batch-dir", str(folder / "batches"), *frontend)

    def restart(self) -> None:
        """Kill the frontend, and start another one over the same directories."""
        self.frontend.send_signal(signal.SIGKILL)
        self.frontend.wait(DEADLINE_S)
        argv = ["--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.frontend = self.run("frontend", *argv, "--batch-dir", str(self.folder / "batches"))
        wait_until(lambda: self.workers() > 0, "the frontend never came back")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchCluster]:
    with BatchCluster(tmp_path_factory.mktemp("batches")) as cluster:
        cluster.mocker("--speedup-ratio", "1")
        yield cluster


@pytest.fixture
def client(cluster: BatchCluster) -> Iterator[openai.OpenAI]:
    with cluster.openai() as client:
        yield client


def lines(count: int, url: str = CHAT, **body: Any) -> bytes:
    body = {"model": "m", "max_tokens": 4, **(body or {"messages": [{"role": "user", "content": "hi"}]})}
    given = [{"custom_id": f"r{place}", "method": "POST", "url": url, "body": body} for place in range(count)]
    return "\n".join(map(json.dumps, given)).encode()


def begin(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    final = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch_id).status in final, "the batch never ended")
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_files_are_uploaded_listed_and_deleted(client: openai.OpenAI) -> None:
    data = lines(3)
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(data), "in.jsonl", "batch", "file")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted is True
    for send_request in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            send_request(file.id)


def test_batch_of_chats_completes(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, lines(20)).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert {one["custom_id"] for one in found} == {f"r{place}" for place in range(20)}
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 4 for one in found)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


def test_batch_of_completions_reports_an_invalid_line(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, lines(2, "/v1/completions", prompt="hi"), "/v1/completions").id)
    assert batch.request_counts.completed == 2
    batch = ended(client, begin(client, b"{\n", CHAT).id)
    assert batch.status == "failed"
    assert batch.errors is not None and [one.line for one in batch.errors.data] == [1]
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="fine-tune")


def test_batch_of_embeddings_completes(cluster: BatchCluster, client: openai.OpenAI) -> None:
    before = cluster.workers()
    cluster.run("cpu", "--model-name", "e", "--embedding-worker")
    wait_until(lambda: cluster.workers() > before, "the worker never appeared")
    wait_until(lambda: "e" in [one.id for one in client.models.list()], "the model never appeared")
    body = {"model": "e", "input": ["one", "two"]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    batch = ended(client, begin(client, json.dumps(line).encode(), "/v1/embeddings").id)
    [answer] = results(client, batch.output_file_id)
    assert [one["index"] for one in answer["response"]["body"]["data"]] == [0, 1]


def test_batch_is_cancelled(client: openai.OpenAI) -> None:
    batch = begin(client, lines(2000, **LONG))
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed + batch.request_counts.failed == 2000
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_killed_frontend_resumes_its_batch(cluster: BatchCluster, client: openai.OpenAI) -> None:
    batch = begin(client, lines(60, **LONG))
    output = cluster.folder / "batches" / "batches" / f"{batch.id}.output"

    def kept_ids() -> list[str]:
        """Return the ids of the complete lines: the last one may still be written."""
        return [json.loads(line)["id"] for line in output.read_bytes().split(b"\n")[:-1]] if output.exists() else []

    wait_until(lambda: len(kept_ids()) >= 5, "nothing was answered")
    cluster.restart()
    kept = kept_ids()
    assert len(kept) >= 5
    batch = ended(client, batch.id)
    found = results(client, batch.output_file_id)
    assert (batch.status, len(found)) == ("completed", 60)
    assert {one["custom_id"] for one in found} == {f"r{place}" for place in range(60)}
    assert [one["id"] for one in found][: len(kept)] == kept


def test_clients_are_served_while_a_batch_runs(client: openai.OpenAI) -> None:
    batch = begin(client, lines(2000, **LONG))
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    client.batches.cancel(batch.id)
    assert ended(client, batch.id).status == "cancelled"


def test_batch_files_are_private(cluster: BatchCluster) -> None:
    modes = {os.stat(path).st_mode & 0o077 for path in (cluster.folder / "batches").rglob("*")}
    assert modes == {0}
