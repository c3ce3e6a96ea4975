"""`dynamo.vllm` with vLLM, behind our frontend: two workers, the KV router, and vLLM's own server for comparison."""

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
from benchmarks.ports import free_port
from tests.cluster.processes import wait_until
from tests.engines.conftest import ANSWER_S, EngineCluster

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
CUT = "\ufffd"  # Replacement of an incomplete character, which vLLM drops at the end of a text.
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
def cluster(serve: Callable[[str], EngineCluster]) -> EngineCluster:
    servers = serve("aggregated")
    servers.frontend("--router-mode", "kv")
    more = (
        *("--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8", "--enable-rl"),
        *("--max-loras", "2"),  # vLLM's CPU kernels give requests without an adapter the last slot's: it must be free.
        # A random model would generate only spaces.
        *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
    )
    for number in range(2):
        port = str(free_port())
        servers.worker(
            f"worker{number}", *more, "--kv-events-config", kv_events(),
            DYN_FORWARDPASS_METRIC_PORT=port, VLLM_CPU_OMP_THREADS_BIND=str(number),
        )  # fmt: skip
    servers.until_ready()
    wait_until(lambda: workers(servers) == 2, f"two workers: {servers.logs()}", 600)
    return servers


def workers(servers: EngineCluster) -> int:
    return len(servers.http.get(servers.url("/health")).json()["instances"])


def chat(servers: EngineCluster, content: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return servers.post("/v1/chat/completions", **{**body, **more})


def test_greedy_text_equals_vllms_server(cluster: EngineCluster, serve: Callable[[str], EngineCluster]) -> None:
    own = serve("own")
    base = own.vllm_server("--enable-prefix-caching")

    def is_up() -> bool:
        assert all(one.poll() is None for one in own.processes), own.logs()
        try:
            return own.http.get(f"{base}/health").status_code == 200
        except Exception:
            return False

    wait_until(is_up, "vLLM's own server never came", 600)
    for prompt in PROMPTS:
        theirs = own.complete(prompt, base)["choices"][0]
        ours = cluster.complete(prompt)["choices"][0]
        assert ours["text"].rstrip(CUT) == theirs["text"].rstrip(CUT)
        assert ours["finish_reason"] == theirs["finish_reason"]
    seeded = {"temperature": 0.8, "seed": 11, "top_p": 0.9}
    assert (
        cluster.complete(PROMPTS[0], **seeded)["choices"][0]["text"]
        == own.complete(PROMPTS[0], base, **seeded)["choices"][0]["text"]
    )
    stops = {"stop": [cluster.complete(PROMPTS[1])["choices"][0]["text"].split()[2]]}
    assert (
        cluster.complete(PROMPTS[1], **stops)["choices"][0]["text"]
        == own.complete(PROMPTS[1], base, **stops)["choices"][0]["text"]
    )
    own.stop()


def test_streamed_text_equals_the_whole_response(cluster: EngineCluster) -> None:
    client = openai.OpenAI(base_url=cluster.url("/v1"), api_key="none", timeout=ANSWER_S, max_retries=0)
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stream=True)
    pieces = [one.choices[0].text for one in stream if one.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == cluster.complete(PROMPTS[0])["choices"][0]["text"]


def test_usage_counts_several_choices(cluster: EngineCluster) -> None:
    found = cluster.complete(PROMPTS[1], n=3, temperature=0.9, seed=3, max_tokens=5)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == 15


def test_logprobs_belong_to_the_generated_tokens(cluster: EngineCluster) -> None:
    content = chat(cluster, PROMPTS[0], logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for one in content:
        best = one["top_logprobs"]
        assert len(best) == 3
        assert one["logprob"] == best[0]["logprob"] == max(top["logprob"] for top in best)  # Greedy decoding.


def test_guided_json_matches_the_schema(cluster: EngineCluster) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = chat(cluster, "say yes or no", response_format=form, max_tokens=64)["choices"][0]["message"]["content"]
    assert json.loads(found) in ({"ok": True}, {"ok": False})


def test_disconnected_client_frees_its_slot(cluster: EngineCluster) -> None:
    body = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 3500, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    with cluster.http.stream("POST", cluster.url("/v1/completions"), json=body) as answer:
        next(answer.iter_lines())
        wait_until(lambda: running(cluster) == 1, "the request never ran", ANSWER_S)
    wait_until(lambda: running(cluster) == 0, "the request went on without its client", ANSWER_S)


def running(servers: EngineCluster) -> float:
    return sum(servers.metric("vllm:num_requests_running", number) for number in range(2))


def test_second_turn_is_routed_to_the_worker_with_cached_blocks(cluster: EngineCluster) -> None:
    first = cluster.complete(LONG, max_tokens=4)
    time.sleep(1)  # The engine publishes the events of its blocks after the response.
    for _ in range(3):
        second = cluster.complete(LONG + "and more", max_tokens=4)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96, (first, second)
    output = subprocess.run(
        [sys.executable, "-m", "dynamo.cli", "route", "explain", "--url", cluster.url("")],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    chosen = re.search(r"→ \w+\s+(\d+)\+", output)  # Blocks of the prompt that the chosen worker holds.
    assert chosen is not None, output
    assert int(chosen[1]) >= 3, output


async def test_forward_pass_metrics_are_published_for_every_step(
    cluster: EngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(cluster.folder / "kv"))
    runtime = DistributedRuntime.from_options(load(RuntimeOptions, ["--discovery-backend", "file"]))
    await runtime.connect()
    received = FpmEventSubscriber(runtime.endpoint("dynamo.backend.generate"))
    received.start_tracking()
    asking = asyncio.create_task(asyncio.to_thread(cluster.complete, PROMPTS[1], max_tokens=1500, ignore_eos=True))
    steps: list[Any] = []
    while not asking.done():
        reported = [read_metrics(one) for one in received.get_recent_stats().values()]
        steps += [one for one in reported if one.scheduled_requests.num_decode_requests]
        await asyncio.sleep(0.02)
    received.shutdown()
    await runtime.shutdown_and_wait()
    assert (await asking)["usage"]["completion_tokens"] == 1500
    assert steps
    assert all(0 < one.wall_time < ANSWER_S and one.scheduled_requests.sum_decode_kv_tokens for one in steps)


def test_loaded_adapter_is_served_as_a_model(cluster: EngineCluster, adapter: str) -> None:
    for number in range(2):
        found = cluster.control("POST", "/v1/loras", number, lora_name="tuned", source={"uri": f"file://{adapter}"})
        assert found.status_code == 200, found.text
        assert cluster.control("GET", "/v1/loras", number).json()["loras"] == {"tuned": found.json()["lora_id"]}
    wait_until(lambda: "tuned" in cluster.models(), "the adapter was never listed", ANSWER_S)
    plain = cluster.complete(PROMPTS[0])["choices"][0]["text"]
    tuned = cluster.complete(PROMPTS[0], model="tuned")["choices"][0]["text"]
    assert tuned != plain
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # Both in one batch.
        both = list(pool.map(lambda name: cluster.complete(PROMPTS[0], model=name), ["tiny", "tuned"] * 2))
    output = {"plain": plain, "tuned": tuned, "both": [one["choices"][0]["text"] for one in both]}
    assert output["both"] == [plain, tuned] * 2, output
    for number in range(2):
        assert cluster.control("DELETE", "/v1/loras/tuned", number).status_code == 200
    wait_until(lambda: "tuned" not in cluster.models(), "the adapter is still listed", ANSWER_S)
    again = cluster.http.post(cluster.url("/v1/completions"), json={"model": "tuned", "prompt": "x"})
    assert again.status_code == 404
    missing = cluster.control("POST", "/v1/loras", 0, lora_name="none", source={"uri": "file:///nowhere"})
    assert missing.status_code == 400


def test_metrics_include_those_of_vllm(cluster: EngineCluster) -> None:
    cluster.complete(PROMPTS[0])
    assert sum(cluster.metric("vllm:generation_tokens_total", number) for number in range(2)) > 0
    assert cluster.metric("dynamo_component_total_blocks") > 0


def test_bad_requests_are_client_errors(cluster: EngineCluster) -> None:
    long = cluster.http.post(cluster.url("/v1/completions"), json={"model": "tiny", "prompt": "many words " * 5000})
    assert long.status_code == 400


def test_sleeping_engine_receives_no_requests(cluster: EngineCluster) -> None:
    slept = cluster.control("POST", "/engine/control/sleep", 1, level=1).json()
    if slept["status"] == "error":
        pytest.skip(f"this build of vLLM cannot sleep: {slept['message']}")
    wait_until(lambda: workers(cluster) == 1, "the sleeper is still found", ANSWER_S)
    assert cluster.complete(PROMPTS[0])["choices"][0]["text"]
    assert cluster.control("POST", "/engine/control/wake_up", 1).json()["status"] == "ok"
    wait_until(lambda: workers(cluster) == 2, "the woken is not found", ANSWER_S)


def test_training_controls_pause_update_and_resume(cluster: EngineCluster) -> None:
    assert cluster.control("POST", "/engine/liveness_probe").json() == {"status": "ok", "alive": True}
    assert cluster.control("POST", "/engine/pause_generation", mode="keep").json()["status"] == "ok"
    assert cluster.control("POST", "/engine/resume_generation").json()["status"] == "ok"
    before = cluster.complete(PROMPTS[0])["choices"][0]["text"]
    loaded = cluster.control(
        "POST", "/engine/update_weights_from_disk", model_path=cluster.model, weight_version="2"
    ).json()
    assert loaded["status"] == "ok", loaded
    assert cluster.control("POST", "/engine/get_weight_version").json()["version"] == "2"
    assert cluster.complete(PROMPTS[0])["choices"][0]["text"] == before


def test_worker_completes_its_requests_after_sigterm(cluster: EngineCluster) -> None:
    answers: list[dict[str, Any]] = []
    body = {"max_tokens": 400, "ignore_eos": True}
    asking = [threading.Thread(target=lambda: answers.append(cluster.complete(PROMPTS[2], **body))) for _ in range(4)]
    for one in asking:
        one.start()
    wait_until(lambda: running(cluster) >= 2, "the requests never ran", ANSWER_S)
    leaving = cluster.processes[2]
    leaving.send_signal(signal.SIGTERM)
    for one in asking:
        one.join(ANSWER_S)
    assert leaving.wait(90) == 0
    assert len(answers) == 4
    assert {one["usage"]["completion_tokens"] for one in answers} == {400}
    assert len({one["choices"][0]["text"] for one in answers}) == 1
    cluster.processes.remove(leaving)
