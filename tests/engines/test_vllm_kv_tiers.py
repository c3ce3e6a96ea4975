"""KV tiers below vLLM's own cache: evicted blocks are loaded again, and the responses stay the same."""

import json
from collections.abc import Callable

import pytest
from tests.engines.conftest import EngineCluster

pytestmark = pytest.mark.engines

CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "dynamo.kvbm.vllm_connector",
}
PROMPTS = [" ".join(f"{(at * 37 + word * 11) % 97}" for word in range(110)) for at in range(5)]


def test_evicted_blocks_are_loaded_from_the_tier_and_not_computed(serve: Callable[[str], EngineCluster]) -> None:
    servers = serve("tiers")
    servers.frontend()
    servers.worker(
        "worker",
        *("--max-model-len", "512", "--num-gpu-blocks-override", "20"),
        *("--kv-transfer-config", json.dumps(CONNECTOR)),
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="32",
        DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS="256",
        DYN_KVBM_DISK_CACHE_DIR=str(servers.folder / "disk"),
        DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER="true",
        DYN_KVBM_ONBOARD_TIMEOUT_SECS="60",
    )
    servers.until_ready()
    rounds = [[servers.complete(prompt, ignore_eos=True) for prompt in PROMPTS] for _ in range(2)]
    first, again = ([one["choices"][0]["text"] for one in answers] for answers in rounds)
    assert again == first
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in rounds[1]]
    tokens = [one["usage"]["prompt_tokens"] for one in rounds[1]]
    assert sum(tokens) > 20 * 32, "the cache holds all of it, and nothing is shown"
    assert [count // 32 for count in cached] == [(count - 1) // 32 for count in tokens]
    assert list((servers.folder / "disk").iterdir())
    servers.stop()
