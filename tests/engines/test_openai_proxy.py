"""`dynamo.openai_proxy` with vLLM's own server: text and tokens, KV events, and its failure."""

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.cluster.processes import wait_until
from tests.engines.conftest import ANSWER_S, PLAIN, EngineCluster
from tests.engines.test_vllm_aggregated import CUT, LONG, PROMPTS

pytestmark = pytest.mark.engines

OURS = "one more request whose second turn finds what the first one left, "


def quiet_port() -> int:
    """Return a free port outside the range of outgoing connections, because the server binds it a minute later."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ProxiedEngines:
    """Servers of vLLM, and a frontend that calls them through proxies."""

    def __init__(self, servers: EngineCluster, *frontend: str) -> None:
        self.servers = servers
        self.urls: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        servers.frontend(*frontend)

    def vllm(self, *argv: str, **variables: str) -> str:
        port = quiet_port()
        number = len(self.urls)
        command = [self.servers.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        self.processes.append(
            self.servers.run(
                f"vllm{number}",
                [
                    *command, "--port", str(port), "--model", self.servers.model, "--served-model-name", "theirs",
                    *PLAIN, "--enable-prefix-caching", "--enable-prompt-tokens-details", *argv,
                ],
                VLLM_CPU_OMP_THREADS_BIND=str(number),
                **variables,
            )
        )  # fmt: skip
        self.urls.append(f"http://127.0.0.1:{port}")
        return self.urls[-1]

    def proxy(self, name: str, url: str, *argv: str) -> None:
        command = [sys.executable, "-m", "dynamo.openai_proxy", "--url", url, "--health-interval-s", "1"]
        self.servers.run(name, [*command, "--load-interval-s", "0.2", *argv])

    def tokens(self, name: str, url: str, *argv: str) -> None:
        self.proxy(name, url, "--model-path", self.servers.model, "--served-model-name", "tiny", *argv)

    def workers(self) -> int:
        return len(self.servers.http.get(self.servers.url("/health")).json()["instances"])

    def running(self) -> float:
        """Return the number of requests that the servers compute."""
        lines = [line for url in self.urls for line in self.metrics(url)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    def metrics(self, url: str) -> list[str]:
        try:
            return self.servers.http.get(f"{url}/metrics").text.splitlines()
        except httpx.TransportError:
            return []


@pytest.fixture(scope="module")
def proxied(serve: Callable[[str], EngineCluster]) -> Iterator[ProxiedEngines]:
    servers = serve("proxied")
    made = ProxiedEngines(servers, "--router-mode", "kv", "--migration-limit", "3")
    for number in range(2):
        # With a name instead of an address vLLM would not listen.
        reported, again = (f"tcp://*:{quiet_port()}" for _ in range(2))
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": reported, "replay_endpoint": again}
        reported, again = (one.replace("*", "127.0.0.1") for one in (reported, again))
        url = made.vllm("--kv-events-config", json.dumps(events))
        made.tokens(
            f"proxy{number}", f"{url}/v1", "--kv-events-endpoint", reported, "--kv-events-replay-endpoint", again
        )  # fmt: skip
    made.proxy("text", made.urls[0], "--served-model-name", "text")
    servers.until_ready("tiny", "text")
    wait_until(lambda: made.workers() == 3, f"three workers: {servers.logs()}", 600)
    yield made
    servers.stop()


def test_greedy_text_equals_the_servers_streamed_and_whole(proxied: ProxiedEngines) -> None:
    servers = proxied.servers
    for prompt in PROMPTS:
        own = servers.complete(prompt, proxied.urls[0], model="theirs")["choices"][0]
        for model in ("tiny", "text"):
            reported = servers.complete(prompt, model=model)["choices"][0]
            assert reported["text"].rstrip(CUT) == own["text"].rstrip(CUT)
            assert reported["finish_reason"] == own["finish_reason"]


def test_seeds_choices_and_logprobs_equal_the_servers(proxied: ProxiedEngines) -> None:
    given: dict[str, Any] = {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": 2, "max_tokens": 8, "top_k": 20}
    own = proxied.servers.complete(PROMPTS[0], proxied.urls[0], model="theirs", **given)
    for model in ("tiny", "text"):
        reported = proxied.servers.complete(PROMPTS[0], model=model, **given)
        assert [one["text"].rstrip(CUT) for one in reported["choices"]] == [
            one["text"].rstrip(CUT) for one in own["choices"]
        ]
        assert reported["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            own["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3
        )
        assert reported["usage"]["completion_tokens"] == 16


def test_guided_json_matches_the_schema(proxied: ProxiedEngines) -> None:
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "yes or no"}], "response_format": form}
    for model in ("tiny", "text"):
        reported = proxied.servers.post("/v1/chat/completions", model=model, max_tokens=200, temperature=0, **given)
        found = reported["choices"][0]
        assert found["finish_reason"] == "length" or json.loads(found["message"]["content"])["ok"] in (True, False)


def test_second_turn_is_routed_to_the_worker_with_cached_blocks(proxied: ProxiedEngines) -> None:
    servers = proxied.servers
    servers.complete(OURS + LONG, max_tokens=4)
    time.sleep(1)  # The server publishes the events of its blocks after the response.
    found = [servers.complete(OURS + LONG + "and more", max_tokens=4)["usage"] for _ in range(3)]
    output = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", "route", "explain", "--url", servers.url("")],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert min(cached) >= 96, f"{cached}\n{output}\n{servers.logs()}"
    chosen = re.search(r"→ \w+\s+(\d+)\+", output)  # Blocks of the prompt that the chosen worker holds.
    assert chosen is not None, output
    assert int(chosen[1]) >= 3, output


def test_disconnected_client_frees_its_slot(proxied: ProxiedEngines) -> None:
    for model in ("tiny", "text"):
        body = {"model": model, "prompt": PROMPTS[2], "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with proxied.servers.http.stream("POST", proxied.servers.url("/v1/completions"), json=body) as answer:
            lines = answer.iter_lines()  # Keep a reference: dropping it closes the connection.
            next(lines)
            wait_until(lambda: proxied.running() == 1, "the request never ran", ANSWER_S)
        wait_until(lambda: proxied.running() == 0, "the request went on without its client", ANSWER_S)


def test_refusals_keep_the_message_of_the_server(proxied: ProxiedEngines) -> None:
    body = {"model": "text", "prompt": "x", "max_tokens": 10, "temperature": 0, "logprobs": 500}
    reported = proxied.servers.http.post(proxied.servers.url("/v1/completions"), json=body)
    assert reported.status_code == 400
    assert "logprobs" in reported.text


def test_stream_continues_when_its_server_is_killed(proxied: ProxiedEngines) -> None:
    servers = proxied.servers
    given: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
    whole = servers.complete(PROMPTS[1], proxied.urls[0], model="theirs", **given)["choices"][0]["text"]
    body = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 0, "stream": True, **given}
    with servers.http.stream("POST", servers.url("/v1/completions"), json=body) as answer:
        lines = answer.iter_lines()
        output = [next(lines) for _ in range(9)]
        victim = next(number for number, url in enumerate(proxied.urls) if _runs(proxied, url))
        proxied.processes[victim].send_signal(signal.SIGKILL)
        servers.processes.remove(proxied.processes[victim])
        output += list(lines)
    chunks = [json.loads(line[6:]) for line in output if line.startswith("data: {")]
    assert not any("error" in one for one in chunks), chunks[-1]
    text = "".join(one["choices"][0]["text"] for one in chunks if one["choices"])
    assert text[:200] == whole[:200]
    wait_until(
        lambda: proxied.workers() == (1 if victim == 0 else 2), "a proxy whose server is gone is still found", ANSWER_S
    )
    proxied.processes[victim].wait()


def _runs(proxied: ProxiedEngines, url: str) -> bool:
    return any(
        line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0
        for line in proxied.metrics(url)
    )
