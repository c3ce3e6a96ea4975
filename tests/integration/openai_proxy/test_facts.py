"""Facts: the requests to a server at the start, and the effect of each response."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration.openai_proxy.conftest import ReceivedRequest, Server, running
from tests.settle import repeat

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.core.tls import PemFile, server_context
from dynamo.cpu.config import DEMO_MODEL
from dynamo.openai_proxy.config import ProxyConfig, TokenApi
from dynamo.openai_proxy.facts import (
    ModelOffer,
    ServerFacts,
    ServerKind,
    find_offers,
    make_client,
    token_api_of,
    version_of,
)

VLLM_METRICS = b'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="200"} 1.0\n'


def models(*names: str, owner: str = "someone", **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "owned_by": owner, **more} for name in names]}


async def test_all_models_of_the_server_are_served_by_name(server: Server) -> None:
    server.page("/v1/models", models("a", "b", "e"))
    facts, offers = await find_offers(ProxyConfig(url=f"{server.url}/v1", embedding_models=["e"]))
    assert offers == [
        ModelOffer(model="a", name="a"),
        ModelOffer(model="b", name="b"),
        ModelOffer(model="e", name="e", embeds=True),
    ]
    assert (facts.kind, facts.health_path, facts.has_metrics) == (ServerKind.OTHER, "/health", False)
    assert facts.token_api is TokenApi.LOGPROBS


async def test_models_can_be_selected_and_renamed(server: Server) -> None:
    server.page("/v1/models", models("a", "b"))
    _, offers = await find_offers(ProxyConfig(url=server.url, models=["b"], served_model_names=["ours"]))
    assert offers == [ModelOffer(model="b", name="ours")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ["c"]}, "not listed by the server, which has a, b"),
        ({"served_model_names": ["x"]}, "1 names for 2 models"),
        ({"model_path": DEMO_MODEL}, "one of a, b"),
    ],
)
async def test_find_offers_rejects_models_that_do_not_match_the_server(
    server: Server, options: dict[str, Any], words: str
) -> None:
    server.page("/v1/models", models("a", "b"))
    with pytest.raises(ConfigError, match=words):
        await find_offers(ProxyConfig(url=server.url, **options))


async def test_vllm_version_and_cache_size_are_read(server: Server) -> None:
    server.page("/v1/models", models("a", owner="vllm", max_model_len=4096))
    server.page("/version", {"version": "0.32.0+cpu"})
    server.page("/metrics", VLLM_METRICS)
    facts, (offer,) = await find_offers(ProxyConfig(url=server.url, model_path=DEMO_MODEL))
    assert offer.context_length == 4096
    assert facts == ServerFacts(
        kind=ServerKind.VLLM,
        version=(0, 32, 0),
        health_path="/health",
        has_metrics=True,
        block_tokens=32,
        total_blocks=200,
    )
    assert facts.token_api is TokenApi.TOKEN_IDS


async def test_sglang_page_size_and_ranks_are_read(server: Server) -> None:
    server.page("/v1/models", models("a", owner="sglang"))
    info = {"version": "0.5.2", "page_size": 64, "max_total_num_tokens": 6400, "dp_size": 2}
    server.page("/get_server_info", info)
    facts, _ = await find_offers(ProxyConfig(url=server.url))
    assert (facts.kind, facts.block_tokens, facts.total_blocks, facts.ranks) == (ServerKind.SGLANG, 64, 100, 2)
    assert facts.token_api is TokenApi.SGLANG


async def test_llama_context_length_is_read(server: Server) -> None:
    server.page("/v1/models", models("a", owner="llamacpp"))
    server.page("/props", {"default_generation_settings": {"n_ctx": 2048}})
    facts, (offer,) = await find_offers(ProxyConfig(url=server.url, model_path=DEMO_MODEL))
    assert (facts.token_api, offer.context_length) == (TokenApi.LLAMA_CPP, 2048)


async def test_health_is_checked_by_the_model_list_without_a_health_page(server: Server) -> None:
    del server.pages["/health"]
    facts, _ = await find_offers(ProxyConfig(url=server.url))
    assert facts.health_path == "/v1/models"


async def test_loading_server_is_awaited(server: Server) -> None:
    requested: list[ReceivedRequest] = []

    async def slow(one: ReceivedRequest) -> None:
        requested.append(one)
        status = 503 if len(requested) == 1 else 200
        await one.answer(models(*("a" for _ in requested[2:3])), status)

    server.pages["/v1/models"] = slow
    clock = ManualClock()
    finding = asyncio.create_task(find_offers(ProxyConfig(url=server.url), clock))
    await repeat(lambda: clock.advance(1.0), finding.done)
    assert (await finding)[1] == [ModelOffer(model="a", name="a")]


async def test_unresponsive_server_times_out() -> None:
    clock = ManualClock()
    config = ProxyConfig(url="http://127.0.0.1:1", ready_timeout_s=3.0)
    finding = asyncio.create_task(find_offers(config, clock))
    await repeat(lambda: clock.advance(1.0), finding.done)
    with pytest.raises(ConfigError, match="not available within 3 s: no connection"):
        await finding


async def test_find_offers_rejects_a_wrong_key_at_once(server: Server) -> None:
    server.page("/v1/models", {"error": {"message": "bad key"}}, 401)
    with pytest.raises(ConfigError, match="401 bad key"):
        await find_offers(ProxyConfig(url=server.url))


async def test_server_without_a_model_list_uses_the_configured_model(server: Server) -> None:
    del server.pages["/v1/models"]
    _, offers = await find_offers(ProxyConfig(url=server.url, models=["a"]))
    assert offers == [ModelOffer(model="a", name="a")]
    with pytest.raises(ConfigError, match="404"):
        await find_offers(ProxyConfig(url=server.url))


async def test_tls_server_is_trusted_by_the_configured_authority(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    tls = server_context(PemFile("cert", files.cert), PemFile("key", files.key), PemFile("ca", ""))
    async with running(tls) as server:
        server.page("/v1/models", models("a"))
        _, offers = await find_offers(ProxyConfig(url=server.url, tls_ca=files.ca))
        assert offers == [ModelOffer(model="a", name="a")]
        with pytest.raises(ConfigError, match="certificate"):
            await find_offers(ProxyConfig(url=server.url, tls_ca=files.other_ca, ready_timeout_s=0.01))
    with pytest.raises(ConfigError, match="--tls-ca"):
        make_client(ProxyConfig(url="https://h", tls_ca=str(tmp_path / "none")))


async def test_find_offers_rejects_a_malformed_model_list(server: Server) -> None:
    server.page("/v1/models", b"<html>")
    with pytest.raises(ConfigError, match="OpenAI's form"):
        await find_offers(ProxyConfig(url=server.url))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.32.0+cpu", (0, 32, 0)), ("v1.2", (1, 2)), ("dev", ()), (None, ()), (5, ())]
)
def test_versions_are_compared_by_number(text: Any, numbers: tuple[int, ...]) -> None:
    assert version_of(text) == numbers


def test_old_vllm_uses_the_logprobs_api_unless_configured() -> None:
    old = ServerFacts(kind=ServerKind.VLLM, version=(0, 9, 1), health_path="/health")
    assert token_api_of(ProxyConfig(url="h"), old) is TokenApi.LOGPROBS
    assert token_api_of(ProxyConfig(url="h", token_api="sglang"), old) is TokenApi.SGLANG
