"""Prefill and decode in two vLLM engines, whose KV blocks move by NIXL, behind our frontend."""

import os
from collections.abc import Callable

import pytest
from benchmarks.ports import free_port
from tests.cluster.processes import wait_until
from tests.engines.conftest import ANSWER_S, EngineCluster
from tests.engines.test_vllm_aggregated import LONG, PROMPTS, kv_events

from dynamo.core.config import setting

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("needs_nixl")]

TRANSFER = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@pytest.fixture(scope="module")
def aggregated(serve: Callable[[str], EngineCluster]) -> list[str]:
    """Return the texts of one aggregated engine."""
    servers = serve("whole")
    servers.frontend()
    servers.worker("worker", "--enable-prefix-caching")
    servers.until_ready()
    output = [servers.complete(prompt)["choices"][0]["text"] for prompt in (*PROMPTS, LONG)]
    servers.stop()
    return output


@pytest.fixture(scope="module")
def cluster(serve: Callable[[str], EngineCluster], aggregated: list[str]) -> EngineCluster:
    servers = serve("disaggregated")
    servers.frontend("--router-mode", "kv")
    for core, role in enumerate(("prefill", "decode")):
        events = ("--kv-events-config", kv_events()) if role == "prefill" else ()
        servers.worker(
            role, "--disaggregation-mode", role, "--enable-prefix-caching", "--kv-transfer-config", TRANSFER, *events,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            VLLM_CPU_OMP_THREADS_BIND=str(core),
        )  # fmt: skip
    servers.until_ready()
    return servers


def test_disaggregated_greedy_tokens_equal_those_of_one_engine(cluster: EngineCluster, aggregated: list[str]) -> None:
    output = [cluster.complete(prompt)["choices"][0]["text"] for prompt in (*PROMPTS, LONG)]
    assert output == aggregated


def test_blocks_are_transferred_and_not_computed_twice(cluster: EngineCluster) -> None:
    before = cluster.metric("vllm:external_prefix_cache_hits_total", 1)
    found = cluster.complete("this prompt was not sent before, " * 8, max_tokens=4)
    moved = cluster.metric("vllm:external_prefix_cache_hits_total", 1) - before
    assert moved >= found["usage"]["prompt_tokens"] - 32
    assert cluster.metric("vllm:nixl_bytes_transferred_sum", 1) > 0


def test_second_turn_uses_cached_blocks_of_the_prefill_worker(cluster: EngineCluster) -> None:
    cluster.complete(LONG, max_tokens=4)
    found = cluster.complete(LONG + " and more", max_tokens=4)
    assert found["choices"][0]["text"]


def test_released_frontend_serves_both_roles(cluster: EngineCluster, aggregated: list[str]) -> None:
    home = setting("DYNAMO_PEER_HOME", "", str)
    python = os.path.join(home, "venv", "bin", "python")
    if not home or not os.path.exists(python):
        pytest.skip("the released Dynamo is not here: DYNAMO_PEER_HOME names its environment")
    ours, cluster.port = cluster.port, free_port()
    command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(cluster.port)]
    peer = cluster.run("peer", [*command, "--discovery-backend", "file"], HOME=str(cluster.folder), PYTHONPATH="")
    try:
        cluster.until_ready()
        wait_until(lambda: _answers(cluster), f"the released frontend never answered: {cluster.logs()}", ANSWER_S)
        output = [cluster.complete(prompt)["choices"][0]["text"] for prompt in (*PROMPTS, LONG)]
        assert output == aggregated
    finally:
        cluster.end(peer)
        cluster.port = ours


def _answers(servers: EngineCluster) -> bool:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    return servers.http.post(servers.url("/v1/completions"), json=body).status_code == 200
