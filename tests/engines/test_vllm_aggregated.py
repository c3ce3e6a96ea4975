"""`dynamo.vllm` with vLLM in it, behind our frontend: two workers, the KV router, and vLLM's own server beside them."""

import asyncio
import concurrent.futures
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from tests.engines.conftest import ANSWER_S, Servers, wait_for
from tests.integration.graph import free_port

from dynamo.core.config import load
from dynamo.llm.forward_pass_api import FpmEventSubscriber, read_metrics
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.distributed import DistributedRuntime

pytestmark = pytest.mark.engines

PROMPTS = (
    "engines and routers, how they find each other",
    "a page says of the workers of a cluster",
    "one more request for the decode workers, and what the metrics say of it",
)
CUT = "\ufffd"  # What is left of a character whose other bytes were never said: vLLM drops it at the end of a text.
LONG = "the workers of a cluster say what their caches hold and the router hears it, " * 12


def kv_events() -> str:
    found = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    return json.dumps(found)


@pytest.fixture(scope="module")
def graph(serve: Callable[[str], Servers]) -> Servers:
    servers = serve("aggregated")
    servers.frontend("--router-mode", "kv")
    more = (
        *("--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8", "--enable-rl"),
        *("--max-loras", "2"),  # vLLM's CPU kernels give requests without an adapter the last slot's: it must be free.
        # A random model would say nothing but spaces.
        *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
    )
    for number in range(2):
        port = str(free_port())
        servers.worker(
            f"worker{number}", *more, "--kv-events-config", kv_events(),
            DYN_FORWARDPASS_METRIC_PORT=port, VLLM_CPU_OMP_THREADS_BIND=str(number),
        )  # fmt: skip
    servers.until_ready()
    wait_for(lambda: workers(servers) == 2, f"two workers: {servers.tails()}", 600)
    return servers


def workers(servers: Servers) -> int:
    return len(servers.http.get(servers.url("/health")).json()["instances"])


def chat(servers: Servers, content: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return servers.post("/v1/chat/completions", **{**body, **more})


def test_greedy_text_is_that_of_vllms_own_server(graph: Servers, serve: Callable[[str], Servers]) -> None:
    own = serve("own")
    base = own.vllm_server("--enable-prefix-caching")

    def is_up() -> bool:
        assert all(one.poll() is None for one in own.processes), own.tails()
        try:
            return own.http.get(f"{base}/health").status_code == 200
        except Exception:
            return False

    wait_for(is_up, "vLLM's own server never came", 600)
    for prompt in PROMPTS:
        theirs = own.complete(prompt, base)["choices"][0]
        ours = graph.complete(prompt)["choices"][0]
        assert ours["text"].rstrip(CUT) == theirs["text"].rstrip(CUT)
        assert ours["finish_reason"] == theirs["finish_reason"]
    seeded = {"temperature": 0.8, "seed": 11, "top_p": 0.9}
    assert (
        graph.complete(PROMPTS[0], **seeded)["choices"][0]["text"]
        == own.complete(PROMPTS[0], base, **seeded)["choices"][0]["text"]
    )
    stops = {"stop": [graph.complete(PROMPTS[1])["choices"][0]["text"].split()[2]]}
    assert (
        graph.complete(PROMPTS[1], **stops)["choices"][0]["text"]
        == own.complete(PROMPTS[1], base, **stops)["choices"][0]["text"]
    )
    own.stop()


def test_a_stream_says_what_the_whole_answer_says(graph: Servers) -> None:
    client = openai.OpenAI(base_url=graph.url("/v1"), api_key="none", timeout=ANSWER_S, max_retries=0)
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stream=True)
    pieces = [one.choices[0].text for one in stream if one.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == graph.complete(PROMPTS[0])["choices"][0]["text"]


def test_usage_and_several_choices(graph: Servers) -> None:
    found = graph.complete(PROMPTS[1], n=3, temperature=0.9, seed=3, max_tokens=5)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == 15


def test_logprobs_are_of_the_tokens_said(graph: Servers) -> None:
    content = chat(graph, PROMPTS[0], logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for one in content:
        best = one["top_logprobs"]
        assert len(best) == 3
        assert one["logprob"] == best[0]["logprob"] == max(top["logprob"] for top in best)  # Greedy: the likeliest.


def test_guided_json_is_of_the_schema(graph: Servers) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = chat(graph, "say yes or no", response_format=form, max_tokens=64)["choices"][0]["message"]["content"]
    assert json.loads(found) in ({"ok": True}, {"ok": False})


def test_a_client_that_leaves_frees_its_slot(graph: Servers) -> None:
    body = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 3500, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    with graph.http.stream("POST", graph.url("/v1/completions"), json=body) as answer:
        next(answer.iter_lines())
        wait_for(lambda: running(graph) == 1, "the request never ran")
    wait_for(lambda: running(graph) == 0, "the request went on without its client")


def running(servers: Servers) -> float:
    return sum(servers.metric("vllm:num_requests_running", number) for number in range(2))


def test_the_second_turn_goes_where_the_first_ones_blocks_are(graph: Servers) -> None:
    first = graph.complete(LONG, max_tokens=4)
    time.sleep(1)  # The engine tells of its blocks after the answer.
    for _ in range(3):
        second = graph.complete(LONG + "and more", max_tokens=4)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96, (first, second)
    said = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", "route", "explain", "--url", graph.url("")],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    chosen = re.search(r"→ \w+\s+(\d+)\+", said)  # Blocks of the prompt that the chosen worker holds.
    assert chosen is not None, said
    assert int(chosen[1]) >= 3, said


async def test_planners_hear_of_every_step(graph: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(graph.folder / "kv"))
    runtime = DistributedRuntime.from_options(load(RuntimeOptions, ["--discovery-backend", "file"]))
    await runtime.connect()
    heard = FpmEventSubscriber(runtime.endpoint("dynamo.backend.generate"))
    heard.start_tracking()
    asking = asyncio.create_task(asyncio.to_thread(graph.complete, PROMPTS[1], max_tokens=1500, ignore_eos=True))
    steps: list[Any] = []
    while not asking.done():
        told = [read_metrics(one) for one in heard.get_recent_stats().values()]
        steps += [one for one in told if one.scheduled_requests.num_decode_requests]
        await asyncio.sleep(0.02)
    heard.shutdown()
    await runtime.shutdown_and_wait()
    assert (await asking)["usage"]["completion_tokens"] == 1500
    assert steps
    assert all(0 < one.wall_time < ANSWER_S and one.scheduled_requests.sum_decode_kv_tokens for one in steps)


def test_a_loaded_adapter_is_a_model_of_its_own(graph: Servers, adapter: str) -> None:
    for number in range(2):
        found = graph.control("POST", "/v1/loras", number, lora_name="tuned", source={"uri": f"file://{adapter}"})
        assert found.status_code == 200, found.text
        assert graph.control("GET", "/v1/loras", number).json()["loras"] == {"tuned": found.json()["lora_id"]}
    wait_for(lambda: "tuned" in graph.models(), "the adapter was never listed")
    plain = graph.complete(PROMPTS[0])["choices"][0]["text"]
    tuned = graph.complete(PROMPTS[0], model="tuned")["choices"][0]["text"]
    assert tuned != plain
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # Both in one batch.
        both = list(pool.map(lambda name: graph.complete(PROMPTS[0], model=name), ["tiny", "tuned"] * 2))
    said = {"plain": plain, "tuned": tuned, "both": [one["choices"][0]["text"] for one in both]}
    assert said["both"] == [plain, tuned] * 2, said
    for number in range(2):
        assert graph.control("DELETE", "/v1/loras/tuned", number).status_code == 200
    wait_for(lambda: "tuned" not in graph.models(), "the adapter is still listed")
    again = graph.http.post(graph.url("/v1/completions"), json={"model": "tuned", "prompt": "x"})
    assert again.status_code == 404
    missing = graph.control("POST", "/v1/loras", 0, lora_name="none", source={"uri": "file:///nowhere"})
    assert missing.status_code == 400


def test_metrics_are_vllms_and_ours(graph: Servers) -> None:
    graph.complete(PROMPTS[0])
    assert sum(graph.metric("vllm:generation_tokens_total", number) for number in range(2)) > 0
    assert graph.metric("dynamo_component_total_blocks") > 0


def test_bad_requests_are_the_clients_fault(graph: Servers) -> None:
    long = graph.http.post(graph.url("/v1/completions"), json={"model": "tiny", "prompt": "many words " * 5000})
    assert long.status_code == 400


def test_an_engine_asleep_is_not_asked(graph: Servers) -> None:
    slept = graph.control("POST", "/engine/control/sleep", 1, level=1).json()
    if slept["status"] == "error":
        pytest.skip(f"this build of vLLM cannot sleep: {slept['message']}")
    wait_for(lambda: workers(graph) == 1, "the sleeper is still found")
    assert graph.complete(PROMPTS[0])["choices"][0]["text"]
    assert graph.control("POST", "/engine/control/wake_up", 1).json()["status"] == "ok"
    wait_for(lambda: workers(graph) == 2, "the woken is not found")


def test_training_controls(graph: Servers) -> None:
    assert graph.control("POST", "/engine/liveness_probe").json() == {"status": "ok", "alive": True}
    assert graph.control("POST", "/engine/pause_generation", mode="keep").json()["status"] == "ok"
    assert graph.control("POST", "/engine/resume_generation").json()["status"] == "ok"
    before = graph.complete(PROMPTS[0])["choices"][0]["text"]
    loaded = graph.control(
        "POST", "/engine/update_weights_from_disk", model_path=graph.model, weight_version="2"
    ).json()
    assert loaded["status"] == "ok", loaded
    assert graph.control("POST", "/engine/get_weight_version").json()["version"] == "2"
    assert graph.complete(PROMPTS[0])["choices"][0]["text"] == before


def test_a_worker_told_to_stop_answers_what_it_has(graph: Servers) -> None:
    answers: list[dict[str, Any]] = []
    body = {"max_tokens": 400, "ignore_eos": True}
    asking = [threading.Thread(target=lambda: answers.append(graph.complete(PROMPTS[2], **body))) for _ in range(4)]
    for one in asking:
        one.start()
    wait_for(lambda: running(graph) >= 2, "the requests never ran")
    leaving = graph.processes[2]
    leaving.send_signal(signal.SIGTERM)
    for one in asking:
        one.join(ANSWER_S)
    assert leaving.wait(90) == 0
    assert len(answers) == 4
    assert {one["usage"]["completion_tokens"] for one in answers} == {400}
    assert len({one["choices"][0]["text"] for one in answers}) == 1
    graph.processes.remove(leaving)
