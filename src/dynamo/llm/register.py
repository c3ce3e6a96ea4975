"""Registration: attaches a model to an endpoint so that frontends discover it.

Names and arguments are upstream's. An unsupported argument raises an error that names it.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from dynamo.core.codec import json_decoder, json_encode
from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.model_card.assets import self_hosted
from dynamo.model_card.card import architectural_context_length, build_card, read_json, slug_of
from dynamo.model_card.hub import resolve_model
from dynamo.model_card.runtime_config import ModelRuntimeConfig, check_taints
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord, RuntimeConfig
from dynamo.routing.python_config import RouterConfig
from dynamo.runtime.component import Endpoint

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16  # Upstream's default, if the engine reports none.

TEXT_ONLY = (
    ModelType.Classify
    | ModelType.Pooling
    | ModelType.Rerank
    | ModelType.Images
    | ModelType.Audios
    | ModelType.Videos
    | ModelType.Realtime
)
"""Model types served only by workers with text input: their requests are not tokenized by the frontend."""
BARE = ModelType.Images | ModelType.Videos | ModelType.Realtime | ModelType.TensorBased
"""Models whose `model_path` may be any name: they are registered without files, as upstream does."""

_decode_record = json_decoder(ModelRecord).decode


async def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    kv_cache_block_size: int | None = None,
    router_config: RouterConfig | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    user_data: Mapping[str, Any] | None = None,
    custom_template_path: str | None = None,
    media_decoder: Any = None,
    media_fetcher: Any = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    worker_type: WorkerType | None = None,
    needs: Sequence[Sequence[WorkerType]] | None = None,
    self_host_metadata: bool | None = None,
    *,
    tensor_model_config: Mapping[str, Any] | None = None,
    ignore_weights: bool = False,
    max_gpu_lora_count: int | None = None,
    model_aliases: Sequence[str] | None = None,
    skip_model_assets: bool = False,
) -> None:
    """Publish the model's card; the model is served while this process also serves the endpoint.

    With a system server (`DYN_SYSTEM_PORT`) the card's files are fetched from this process, unless `self_host_metadata`
    is False. `model_path` is a directory, or a name on the Hugging Face hub. With `skip_model_assets`, and for tensors,
    it is only a name, and the card has no files: for workers with text input.

    With `lora_name` it is the card of an adapter, which is served in addition to the model: its name is the adapter's,
    and its files are those of `base_model_path`. Raise `InvalidArgument` that names a wrong or unsupported argument,
    `ValueError` for one of these two without the other, `ConfigError` for a model that cannot be read.
    """
    for name, value in {
        "media_decoder": media_decoder,
        "media_fetcher": media_fetcher,
    }.items():
        if value is not None:
            raise InvalidArgument(f"register_model: {name} is not supported by this release", param=name)
    if (lora_name is None) != (base_model_path is None):
        raise ValueError("register_model: lora_name and base_model_path: expected both or neither")
    check_kinds(model_input, model_type, worker_type, skip_model_assets=skip_model_assets)
    worker_type = role_of(model_input, model_type, worker_type, needs or ())
    if tensor_model_config is not None and model_input is not ModelInput.Tensor:
        raise InvalidArgument(
            "register_model: tensor_model_config is for model_input Tensor", param="tensor_model_config"
        )
    skip_model_assets = skip_model_assets or bool(model_type and not model_type & ~BARE)
    config = (runtime_config or ModelRuntimeConfig()).on_card()
    common = {
        "model_type": model_type.on_card,
        "model_input": model_input.value,
        "worker_type": worker_type.value,
        "needs": [[one.value for one in group] for group in needs or ()],
        "user_data": UNSET if user_data is None else dict(user_data),
        "model_aliases": list(model_aliases or ()),
        "router_config": None if router_config is None else router_config.on_card(),
    }
    name = lora_name or model_name or model_path
    suffix = "" if lora_name is None else slug_of(lora_name)
    if model_input is ModelInput.Tensor:
        common["tensor_model_config"] = UNSET if tensor_model_config is None else dict(tensor_model_config)
    if skip_model_assets:
        card = bare_card(name, model_path, config, common, kv_cache_block_size, custom_template_path)
    else:
        directory = await asyncio.to_thread(resolve_model, base_model_path or model_path, weights=not ignore_weights)
        card = await asyncio.to_thread(
            full_card, directory, name, config, common, kv_cache_block_size, custom_template_path
        )
        await endpoint.runtime.start_system_server()
        card = self_hosted(card, endpoint.id, endpoint.runtime.show_file, self_host_metadata)
    if lora_name is not None:
        lora: dict[str, Any] = {"name": lora_name}
        if max_gpu_lora_count is not None:
            lora["max_gpu_lora_count"] = max_gpu_lora_count
        card = msgspec.structs.replace(card, lora=lora)
    await publish_card(endpoint, card, suffix)
    logger.info("registered model %s at %s", name, endpoint)


async def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> None:
    """Remove the card of the model, or of an adapter; active requests continue."""
    await endpoint.discovery.delete(MODEL_CARDS, card_key(endpoint, "" if lora_name is None else slug_of(lora_name)))


async def update_model_taints(endpoint: Endpoint, taints: Iterable[str]) -> None:
    """Replace the taints on the card of this process's model. Raise `NotFound` if none is registered."""
    wanted = check_taints(set(taints))
    raw = (await endpoint.discovery.snapshot(MODEL_CARDS)).get(endpoint.record_key)
    if raw is None:
        raise NotFound(f"this process has not registered a model at {endpoint}")
    record = _decode_record(raw)
    config = msgspec.structs.replace(record.card_json.runtime_config, taints=wanted or UNSET)
    await publish_card(endpoint, msgspec.structs.replace(record.card_json, runtime_config=config))


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return the local directory of a model, downloaded if not cached. Raise `ConfigError` with a one-line message."""
    return await asyncio.to_thread(resolve_model, remote_name, weights=not ignore_weights)


def check_kinds(
    model_input: ModelInput, model_type: ModelType, worker_type: WorkerType | None, *, skip_model_assets: bool
) -> None:
    """Raise `InvalidArgument` for an invalid combination of arguments."""
    for name, value, kind in (
        ("model_input", model_input, ModelInput),
        ("model_type", model_type, ModelType),
        ("worker_type", worker_type or WorkerType.Aggregated, WorkerType),
    ):
        if not isinstance(value, kind):
            raise InvalidArgument(f"register_model: {name} {value!r}: expected a {kind.__name__}", param=name)
    if (model_input is ModelInput.Tensor) != (ModelType.TensorBased in model_type):
        raise InvalidArgument(
            f"register_model: model_input {model_input.name} with model_type {model_type}: Tensor requires TensorBased",
            param="model_input",
        )
    if skip_model_assets and model_input is ModelInput.Tokens and model_type & ~ModelType.Prefill:
        raise InvalidArgument(
            "register_model: skip_model_assets excludes the tokenizer; expected ModelInput.Text",
            param="skip_model_assets",
        )
    if model_input is ModelInput.Tokens and model_type & TEXT_ONLY:
        raise InvalidArgument(
            f"register_model: {model_type & TEXT_ONLY} requires a worker with text input; expected ModelInput.Text",
            param="model_input",
        )


def role_of(
    model_input: ModelInput,
    model_type: ModelType,
    worker_type: WorkerType | None,
    needs: Sequence[Sequence[WorkerType]],
) -> WorkerType:
    """Return the worker type. Raise `InvalidArgument` for a worker that could not serve its phase of a request."""
    if worker_type is None:
        if not model_type & ~ModelType.Prefill:
            raise InvalidArgument(
                f"register_model: worker_type is required with {model_type!r}: expected a WorkerType",
                param="worker_type",
            )
        return WorkerType.Aggregated
    if worker_type is WorkerType.Aggregated:
        return worker_type
    role = f"register_model: worker_type {worker_type.name}"
    if worker_type is WorkerType.Prefill and model_type & ~ModelType.Prefill:
        raise InvalidArgument(
            f"{role} with {model_type!r}: a prefill worker has no API surface; expected ModelType.Prefill or Empty",
            param="model_type",
        )
    if worker_type is not WorkerType.Decode and model_input is not ModelInput.Tokens:
        raise InvalidArgument(f"{role} with {model_input}: expected ModelInput.Tokens", param="model_input")
    if not needs:
        raise InvalidArgument(f"{role}: `needs` is empty; expected the worker types that it depends on", param="needs")
    return worker_type


def bare_card(
    name: str,
    source: str,
    config: RuntimeConfig,
    common: dict[str, Any],
    block_tokens: int | None,
    template: str | None,
) -> ModelDeploymentCard:
    """Return a card without files. Raise `InvalidArgument` for a template, which would be a file."""
    if template is not None:
        raise InvalidArgument(
            "register_model: custom_template_path needs the model's tokenizer, which skip_model_assets excludes",
            param="custom_template_path",
        )
    aliases, routing = common.pop("model_aliases"), common.pop("router_config")
    return ModelDeploymentCard(
        display_name=name,
        slug=slug_of(name),
        source_path=source,
        context_length=config.context_length or 0,
        kv_cache_block_size=block_tokens or 0,
        model_aliases=aliases or UNSET,
        router_config=UNSET if routing is None else routing,
        runtime_config=config,
        **common,
    )


def full_card(
    directory: str,
    name: str,
    config: RuntimeConfig,
    common: dict[str, Any],
    block_tokens: int | None,
    template: str | None,
) -> ModelDeploymentCard:
    """Return the card of a model directory; reads and hashes its files."""
    length = config.context_length or architectural_context_length(read_json(f"{directory}/config.json")) or 0
    return build_card(
        directory,
        name,
        context_length=length,
        kv_cache_block_size=block_tokens or BLOCK_TOKENS,
        runtime_config=config,
        custom_template=template,
        **common,
    )


def card_key(endpoint: Endpoint, suffix: str = "") -> str:
    """Return the key of this process's model card, or of the card of an adapter served with it."""
    return f"{endpoint.record_key}/{suffix}" if suffix else endpoint.record_key


async def publish_card(endpoint: Endpoint, card: ModelDeploymentCard, suffix: str = "") -> None:
    """Write the card of this process's model at that endpoint, or, with a suffix, of an additional one."""
    record = ModelRecord(
        namespace=endpoint.id.namespace,
        component=endpoint.id.component,
        endpoint=endpoint.id.name,
        instance_id=endpoint.connection_id(),
        card_json=card,
        model_suffix=suffix or UNSET,
    )
    await endpoint.discovery.put(MODEL_CARDS, card_key(endpoint, suffix), json_encode(record))
