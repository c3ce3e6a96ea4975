"""OpenAI proxy: a frontend calls another one, with the embedded engine, through the proxy."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx
import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import DEADLINE_S, wait_until

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "What is a worker?"}]
CHAT_PATH = "/v1/chat/completions"
QUICK = ("--health-interval-s", "0.5", "--load-interval-s", "0.2")


class ProxyClusters:
    """Two servers of the same model, and a frontend that has proxies to them."""

    def __init__(self, folder: Any) -> None:
        self.servers: list[Cluster] = []
        self.front: Cluster | None = None
        self._folder = folder
        self._clients: dict[int, openai.OpenAI] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def server(self) -> Cluster:
        folder = self._folder / f"server{len(self.servers)}"
        folder.mkdir()
        made = Cluster(folder)
        self.servers.append(made)
        made.run("cpu", "--model-name", "demo")
        return made

    def frontend(self, *argv: str) -> Cluster:
        folder = self._folder / "front"
        folder.mkdir()
        self.front = Cluster(folder, *argv)
        return self.front

    def proxy(self, server: Cluster, *argv: str) -> None:
        assert self.front is not None
        self.front.run("openai_proxy", "--url", f"http://127.0.0.1:{server.port}/v1", *QUICK, *argv)

    def client(self, cluster: Cluster | None = None) -> openai.OpenAI:
        """Return a client of the frontend, or of a server."""
        requested = cluster or self.front
        assert requested is not None
        if requested.port not in self._clients:
            self._clients[requested.port] = requested.openai()
        return self._clients[requested.port]

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        for cluster in (self.front, *self.servers):
            if cluster is not None:
                cluster.stop()

    def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Poll until the condition is true; the error shows the logs of all clusters."""
        try:
            wait_until(is_true, what)
        except AssertionError as error:
            groups = [self.front, *self.servers]
            raise AssertionError("\n".join([what, *(one.logs() for one in groups if one is not None)])) from error


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyClusters]:
    with ProxyClusters(tmp_path_factory.mktemp("proxy")) as made:
        server, front = made.server(), made.frontend()
        made.proxy(server, "--served-model-name", "text")
        made.proxy(server, "--served-model-name", "tokens", "--model-path", DEMO_MODEL)
        made.until(lambda: listed(front) == {"text", "tokens"}, "the proxies never appeared")
        yield made


def listed(cluster: Cluster) -> set[str]:
    try:
        return {one["id"] for one in cluster.http.get("/v1/models").json()["data"]}
    except httpx.TransportError:
        return set()


def test_greedy_text_equals_the_servers_streamed_and_whole(clusters: ProxyClusters) -> None:
    own = clusters.client(clusters.servers[0]).chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    for model in ("text", "tokens"):
        whole = clusters.client().chat.completions.create(model=model, messages=MESSAGES, temperature=0)
        assert whole.choices[0].message.content == own.choices[0].message.content
        assert whole.choices[0].finish_reason == own.choices[0].finish_reason
        assert whole.model == model
        assert whole.usage is not None
        assert own.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            own.usage.prompt_tokens, own.usage.completion_tokens,
        )  # fmt: skip
        stream = clusters.client().chat.completions.create(model=model, messages=MESSAGES, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert len(pieces) > 3
        assert "".join(pieces) == own.choices[0].message.content


@pytest.mark.parametrize("model", ["text", "tokens"])
def test_completions_with_options_and_logprobs_pass(clusters: ProxyClusters, model: str) -> None:
    given: Any = {"prompt": "A worker", "max_tokens": 8, "seed": 3, "temperature": 0.9, "n": 2, "logprobs": 2}
    own = clusters.client(clusters.servers[0]).completions.create(model="demo", **given)
    reported = clusters.client().completions.create(model=model, **given)
    assert [one.text for one in reported.choices] == [one.text for one in own.choices]
    assert [one.finish_reason for one in reported.choices] == [one.finish_reason for one in own.choices]
    assert own.choices[0].logprobs is not None
    assert reported.choices[0].logprobs is not None
    assert reported.choices[0].logprobs.token_logprobs == pytest.approx(
        own.choices[0].logprobs.token_logprobs, abs=1e-4
    )


def test_stream_has_usage_only_when_requested(clusters: ProxyClusters) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for model in ("text", "tokens"):
            stream = clusters.client().chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=4, stream=True, **options
            )
            counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
            assert counts == ([4] if options else [])


def test_refusal_keeps_its_status_and_message(clusters: ProxyClusters) -> None:
    with pytest.raises(openai.BadRequestError, match="emperature") as text:
        clusters.client().chat.completions.create(model="text", messages=MESSAGES, temperature=9)
    assert text.value.status_code == 400


def test_tools_are_passed_unchanged(clusters: ProxyClusters) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    given: Any = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 48, "temperature": 0}
    own = clusters.client(clusters.servers[0]).chat.completions.create(model="demo", **given).choices[0]
    reported = clusters.client().chat.completions.create(model="text", **given).choices[0]
    assert reported.finish_reason == own.finish_reason
    assert [call.function.name for call in reported.message.tool_calls or ()] == [  # type: ignore[union-attr]
        call.function.name
        for call in own.message.tool_calls or ()  # type: ignore[union-attr]
    ]
    assert reported.message.content == own.message.content


@pytest.mark.parametrize("model", ["text", "tokens"])
def test_disconnected_client_frees_the_server(clusters: ProxyClusters, model: str) -> None:
    server, front = clusters.servers[0], clusters.front
    assert front is not None
    clusters.until(lambda: server.workers() == 1, "the server has no worker")
    body = {"model": model, "messages": MESSAGES, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    worker = server.processes[-1]
    worker.send_signal(signal.SIGSTOP)  # The request does not end by itself.
    try:
        client = front.connect(json.dumps(body).encode())
        clusters.until(lambda: inflight(server) >= 1, "the request never reached the server")
        client.close()
        clusters.until(lambda: inflight(server) == 0, "the server continues an abandoned request")
    finally:
        worker.send_signal(signal.SIGCONT)


def inflight(cluster: Cluster) -> float:
    return cluster.metric("dynamo_frontend_inflight_requests")


def test_stream_continues_when_its_server_is_killed(tmp_path: Any) -> None:
    with ProxyClusters(tmp_path) as clusters:
        servers, front = [clusters.server(), clusters.server()], clusters.frontend("--migration-limit", "3")
        for server in servers:
            clusters.proxy(server, "--model-path", DEMO_MODEL, "--served-model-name", "m")
        clusters.until(lambda: front.workers() == 2, "the proxies never appeared")
        body = {
            "model": "m", "messages": MESSAGES, "max_tokens": 1500, "stream": True, "temperature": 0,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        workers = [server.processes[-1] for server in servers]
        for worker in workers:  # The server of the request is found before the response begins, which takes seconds.
            worker.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(front.http.send, front.http.build_request("POST", CHAT_PATH, json=body), stream=True)
            clusters.until(lambda: any(map(inflight, servers)), "the request never reached a server")
            victim = next(one for one in servers if inflight(one))
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
            answer = sent.result(DEADLINE_S)
        with contextlib.closing(answer):
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            output = [next(lines) for _ in range(5)]
            for process in victim.processes:
                process.send_signal(signal.SIGKILL)
            output += list(lines)
        chunks = [json.loads(line[6:]) for line in output if line.startswith("data: {")]
        assert not any("error" in chunk for chunk in chunks), chunks[-1]
        assert output[-2:] == ["data: [DONE]", ""] or output[-1] == "data: [DONE]"
        assert chunks[-1]["usage"]["completion_tokens"] == 1500
        clusters.until(lambda: front.workers() == 1, "a proxy whose server is gone is still found")
        for _ in range(4):
            found = clusters.client().chat.completions.create(model="m", messages=MESSAGES, max_tokens=2)
            assert found.choices[0].finish_reason
