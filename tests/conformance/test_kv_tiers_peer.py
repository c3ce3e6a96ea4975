"""KV tiers and the released router: a router that starts late receives the blocks of our worker's lower tiers."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.peers import OURS, READY_S, THEIRS, PeerCluster, require_peer

pytestmark = pytest.mark.conformance

CHAT = "/v1/chat/completions"
PROMPTS = [" ".join(f"{at} follows {at * 97 + word * 13}" for word in range(14)) for at in range(8)]
CACHE_BLOCKS = 64


class TierPeers(PeerCluster):
    """A worker with a small cache and a large host tier, and frontends that the test adds."""

    def chat(self, port: int, prompt: str) -> Any:
        response = self.request(port, "POST", CHAT, chat(prompt))
        assert response.status == 200, response.body
        return response.json

    def wait_chat(self, port: int, prompt: str) -> None:
        self.wait_until(lambda: self.is_answered(port, CHAT, chat(prompt)), "a frontend did not serve", READY_S)


def chat(prompt: str) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 2,
        "temperature": 0,
        "nvext": {"extra_fields": ["timing", "worker_id"]},
    }


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[TierPeers]:
    require_peer()
    with TierPeers(tmp_path, frontends=()) as peers:
        yield peers


def test_released_router_that_starts_late_counts_host_blocks(peers: TierPeers) -> None:
    worker = ["-m", "dynamo.cpu", "--model-name", "m", "--threads", "1", "--kv-cache-blocks", str(CACHE_BLOCKS)]
    peers.run(
        [sys.executable, *worker],
        DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS="512",
    )
    ours = peers.start_frontend(OURS, "--router-mode", "kv")
    for prompt in PROMPTS:
        peers.wait_chat(ours, prompt)
    theirs = peers.start_frontend(THEIRS, "--router-mode", "kv")
    peers.wait_chat(theirs, "Nothing that anybody asked before.")
    rate = 0.0
    for prompt in PROMPTS[:3]:  # The first blocks have left the cache; a query may precede their events.
        rate = peers.chat(theirs, prompt)["nvext"]["timing"]["kv_hit_rate"]
        if rate > 0.5:
            return
        time.sleep(2)
    pytest.fail(f"the released router knows of nothing in the host: hit rate {rate}")
