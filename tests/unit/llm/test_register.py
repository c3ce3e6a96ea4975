"""Registration: a model's card appears, changes and is removed, and unsupported options are errors."""

from collections.abc import AsyncIterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.codec import json_decode
from dynamo.core.errors import ConfigError, InvalidArgument, NotFound
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    fetch_llm,
    fetch_model,
    lora_name_to_id,
    register_llm,
    register_model,
    unregister_llm,
    unregister_model,
    update_model_taints,
)
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.runtime.component import Endpoint
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.distributed import DistributedRuntime

BOTH = ModelType.Chat | ModelType.Completions
NEEDS_DECODE = {"needs": [[WorkerType.Decode]]}


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    runtime = DistributedRuntime(None, MemoryDiscovery(MemoryStore()), "mem", event_plane="mem")
    yield runtime.endpoint("ns.comp.ep")
    await runtime.shutdown()


async def card_at(endpoint: Endpoint) -> dict[str, Any] | None:
    raw = (await endpoint.discovery.snapshot(MODEL_CARDS)).get(endpoint.record_key)
    if raw is None:
        return None
    record = json_decode(raw)
    assert (record["type"], record["namespace"], record["component"], record["endpoint"], record["instance_id"]) == (
        "Model", "ns", "comp", "ep", endpoint.connection_id(),
    )  # fmt: skip
    card: dict[str, Any] = record["card_json"]
    return card


async def test_model_directory_is_registered_with_its_files(endpoint: Endpoint, model_dir: Path) -> None:
    config = ModelRuntimeConfig()
    config.max_num_seqs = 8
    await register_model(
        ModelInput.Tokens, BOTH, endpoint, str(model_dir), "named",
        worker_type=WorkerType.Decode, needs=[[WorkerType.Prefill]], runtime_config=config, kv_cache_block_size=32,
        user_data={"u": 1}, model_aliases=["also"],
    )  # fmt: skip
    card = await card_at(endpoint)
    assert card is not None
    expected = {
        "display_name": "named", "source_path": str(model_dir), "model_type": "Chat | Completions",
        "model_input": "Tokens", "worker_type": "decode", "needs": [["prefill"]], "kv_cache_block_size": 32,
        "context_length": 512, "user_data": {"u": 1}, "aliases": ["also"],
    }  # fmt: skip
    assert {name: card[name] for name in expected} == expected
    assert card["runtime_config"]["max_num_seqs"] == 8
    assert card["tokenizer"]["hf_tokenizer_json"]["path"] == str(model_dir / "tokenizer.json")


@pytest.mark.parametrize("bare", [True, False])
async def test_worker_set_can_register_a_router_config(endpoint: Endpoint, model_dir: Path, bare: bool) -> None:
    await register_model(
        ModelInput.Text, ModelType.Chat, endpoint, str(model_dir),
        skip_model_assets=bare, router_config=RouterConfig(RouterMode.Random, active_decode_blocks_threshold=0.5),
    )  # fmt: skip
    card = await card_at(endpoint)
    assert card is not None
    assert card["router_config"]["router_mode"] == "random"
    assert card["router_config"]["load_threshold_config"] == {"active_decode_blocks_threshold": 0.5}


async def test_text_model_can_be_registered_without_files(endpoint: Endpoint) -> None:
    await register_model(
        ModelInput.Text, ModelType.Chat, endpoint, "outside/service", "text",
        worker_type=WorkerType.Aggregated, skip_model_assets=True,
    )  # fmt: skip
    card = await card_at(endpoint)
    assert card is not None
    assert (card["display_name"], card["source_path"], card["model_input"]) == ("text", "outside/service", "Text")
    assert (card["model_info"], card["tokenizer"], card["context_length"]) == (None, None, 0)


async def test_deprecated_functions_register_and_unregister_a_model(endpoint: Endpoint, model_dir: Path) -> None:
    await register_llm(ModelInput.Tokens, ModelType.Chat, endpoint, str(model_dir))
    card = await card_at(endpoint)
    assert card is not None
    assert (card["display_name"], card["worker_type"], card["kv_cache_block_size"]) == (
        str(model_dir),
        "aggregated",
        16,
    )
    await unregister_llm(endpoint)
    assert await card_at(endpoint) is None
    await unregister_model(endpoint)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tensor_model_config", {}),
        ("media_decoder", object()),
        ("media_fetcher", object()),
    ],
)
async def test_unsupported_register_argument_is_refused_by_name(endpoint: Endpoint, argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=argument) as raised:
        await register_model(
            ModelInput.Text, ModelType.Chat, endpoint, "m", skip_model_assets=True, **{argument: value}
        )
    assert raised.value.param == argument
    assert await card_at(endpoint) is None


@pytest.mark.parametrize(
    ("kinds", "more", "named"),
    [
        ((ModelInput.Tokens, ModelType.Chat), {"skip_model_assets": True}, "skip_model_assets"),
        ((ModelInput.Tensor, ModelType.Chat), {"skip_model_assets": True}, "model_input"),
        ((ModelInput.Text, "chat"), {"skip_model_assets": True}, "model_type"),
        (("text", ModelType.Chat), {"skip_model_assets": True}, "model_input"),
        ((ModelInput.Text, ModelType.Chat), {"skip_model_assets": True, "worker_type": "decode"}, "worker_type"),
        ((ModelInput.Tokens, ModelType(0)), {}, "worker_type"),
        ((ModelInput.Tokens, ModelType.Chat), {"worker_type": WorkerType.Prefill, **NEEDS_DECODE}, "surface"),
        ((ModelInput.Text, ModelType.Prefill), {"worker_type": WorkerType.Prefill, **NEEDS_DECODE}, "ModelInput"),
        ((ModelInput.Tokens, ModelType.Prefill), {"worker_type": WorkerType.Prefill, "needs": []}, "needs"),
        ((ModelInput.Tokens, ModelType.Chat), {"worker_type": WorkerType.Decode}, "needs"),
        (
            (ModelInput.Text, ModelType.Chat),
            {"skip_model_assets": True, "custom_template_path": "t.jinja"},
            "custom_template_path",
        ),
    ],
)
async def test_contradictory_register_arguments_are_refused(
    endpoint: Endpoint, kinds: tuple[Any, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        await register_model(*kinds, endpoint, "m", **more)
    assert await card_at(endpoint) is None


async def test_missing_model_path_is_a_config_error(endpoint: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        await register_model(ModelInput.Tokens, BOTH, endpoint, str(tmp_path / "nowhere"))


async def test_text_only_model_types_are_refused_with_token_input(endpoint: Endpoint) -> None:
    for kind in (ModelType.Rerank, ModelType.Images, ModelType.Chat | ModelType.Classify):
        with pytest.raises(InvalidArgument, match=r"ModelInput\.Text"):
            await register_model(ModelInput.Tokens, kind, endpoint, "m")


async def test_image_model_can_be_registered_without_files(endpoint: Endpoint) -> None:
    await register_model(ModelInput.Text, ModelType.Images, endpoint, "some/service")
    card = await card_at(endpoint)
    assert card is not None
    assert (card["display_name"], card["model_type"]) == ("some/service", "Images")


async def test_taints_are_replaced(endpoint: Endpoint) -> None:
    with pytest.raises(NotFound):
        await update_model_taints(endpoint, {"a"})
    await register_model(ModelInput.Text, ModelType.Chat, endpoint, "m", skip_model_assets=True)
    for taints, expected in (({"b", "a"}, ["a", "b"]), (set(), None)):
        await update_model_taints(endpoint, taints)
        card = await card_at(endpoint)
        assert card is not None
        assert card["runtime_config"].get("taints") == expected
    with pytest.raises(InvalidArgument):
        await update_model_taints(endpoint, {"dynamo.topology/x"})


async def test_adapter_card_is_published_next_to_its_base_model(endpoint: Endpoint, model_dir: Path) -> None:
    for more in ({"max_gpu_lora_count": 3}, {"lora_name": "My Lora/x", "base_model_path": str(model_dir)}):
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            str(model_dir),
            model_name="base",
            worker_type=WorkerType.Aggregated,
            **more,
        )
    found = await endpoint.discovery.snapshot(MODEL_CARDS)
    base, extra_dir = (json_decode(found[key]) for key in (endpoint.record_key, f"{endpoint.record_key}/my_lora_x"))
    assert (extra_dir["model_suffix"], extra_dir["card_json"]["display_name"]) == ("my_lora_x", "My Lora/x")
    assert extra_dir["card_json"]["lora"] == {"name": "My Lora/x"}
    assert "model_suffix" not in base
    assert base["card_json"]["display_name"] == "base"
    assert "lora" not in base["card_json"]
    await unregister_model(endpoint, "My Lora/x")
    assert (await endpoint.discovery.snapshot(MODEL_CARDS)).keys() == {endpoint.record_key}


@pytest.mark.parametrize("argument", ["lora_name", "base_model_path"])
async def test_adapter_requires_a_name_and_a_base_model(endpoint: Endpoint, argument: str) -> None:
    with pytest.raises(ValueError, match="both or neither"):
        await register_model(
            ModelInput.Text,
            ModelType.Chat,
            endpoint,
            "m",
            skip_model_assets=True,
            worker_type=WorkerType.Aggregated,
            **{argument: "x"},
        )


async def test_fetch_model_returns_a_local_directory_unchanged(model_dir: Path) -> None:
    assert await fetch_model(str(model_dir)) == await fetch_llm(str(model_dir), ignore_weights=True) == str(model_dir)


@pytest.mark.parametrize(("name", "number"), [("x", 1987615332), ("foo.lora", 200896350)])
def test_lora_name_to_id_equals_that_of_upstream(name: str, number: int) -> None:
    assert lora_name_to_id(name) == number


def test_register_arguments_have_upstream_positions() -> None:
    positional = [
        one.name for one in signature(register_model).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    assert positional[4:8] == ["model_name", "kv_cache_block_size", "router_config", "runtime_config"]
    assert positional[-3:] == ["worker_type", "needs", "self_host_metadata"]
