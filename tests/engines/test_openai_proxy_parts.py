"""`dynamo.openai_proxy` with two of vLLM's own servers: one computes the prompt, the other decodes over NIXL."""

from collections.abc import Callable, Iterator

import pytest
from tests.engines.conftest import EngineCluster
from tests.engines.test_openai_proxy import ProxiedEngines, quiet_port
from tests.engines.test_vllm_aggregated import CUT, LONG, PROMPTS
from tests.engines.test_vllm_disaggregated import TRANSFER

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("needs_nixl")]


@pytest.fixture(scope="module")
def parts(serve: Callable[[str], EngineCluster]) -> Iterator[ProxiedEngines]:
    servers = serve("proxied-parts")
    made = ProxiedEngines(servers)
    for role in ("prefill", "decode"):
        url = made.vllm(
            "--kv-transfer-config", TRANSFER,
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(quiet_port()),
        )  # fmt: skip
        made.tokens(role, url, "--disaggregation-mode", role)
    servers.until_ready("tiny")
    yield made
    servers.stop()


def test_prefill_and_decode_servers_serve_requests_together(parts: ProxiedEngines) -> None:
    servers = parts.servers
    for prompt in (*PROMPTS, LONG):
        own = servers.complete(prompt, parts.urls[0], model="theirs")["choices"][0]["text"]
        assert servers.complete(prompt)["choices"][0]["text"].rstrip(CUT) == own.rstrip(CUT)
    moved = [line for line in parts.metrics(parts.urls[1]) if line.startswith("vllm:nixl_bytes_transferred_sum")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in moved) > 0
