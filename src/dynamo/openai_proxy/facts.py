"""Facts: detection of a server's kind, models and cache, once it is available."""

import asyncio
import logging
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE, json_decode
from dynamo.core.errors import ConfigError, WorkerUnavailable
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.openai_proxy.config import AUTO, ProxyConfig, TokenApi
from dynamo.openai_proxy.convert import message_of
from dynamo.openai_proxy.metrics import cache_shape, samples_of

logger = logging.getLogger(__name__)

LOOK_S = 10.0  # Timeout of requests that a server answers without computation.
RETRY_S = 1.0
PROGRESS_S = 10.0
PAGE_BYTES_MAX = 16 << 20
TOKEN_IDS_SINCE = (0, 10, 2)
"""First vLLM version with `return_token_ids`."""
BLOCK_TOKENS = 16  # vLLM's default.


class ServerKind(Enum):
    """Kind of server."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llamacpp"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """One model of the server."""

    model: str
    """The server's name of the model."""
    name: str
    """The model's name in this deployment."""
    embeds: bool = False
    context_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties common to all models of the server."""

    kind: ServerKind = ServerKind.OTHER
    version: tuple[int, ...] = ()
    health_path: str
    has_metrics: bool = False
    block_tokens: int | None = None
    total_blocks: int | None = None
    """Blocks of each rank."""
    ranks: int = 1

    @property
    def token_api(self) -> TokenApi:
        """Return the default API for tokens of this kind and version of server."""
        match self.kind:
            case ServerKind.SGLANG:
                return TokenApi.SGLANG
            case ServerKind.LLAMA_CPP:
                return TokenApi.LLAMA_CPP
            case ServerKind.VLLM if self.version >= TOKEN_IDS_SINCE:
                return TokenApi.TOKEN_IDS
            case _:
                return TokenApi.LOGPROBS


def make_client(config: ProxyConfig) -> HttpClient:
    """Return a client of the server. Raises `ConfigError`."""
    tls = None
    if config.tls_ca is not None:
        try:
            tls = ssl.create_default_context(cafile=config.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-ca {config.tls_ca}: {error.strerror or error}") from None
    deadlines = Deadlines(config.connect_timeout_s, config.first_byte_timeout_s, config.stream_timeout_s)
    return HttpClient(config.base_url, deadlines, headers=config.request_headers(), tls=tls)


async def find_offers(config: ProxyConfig, clock: Clock | None = None) -> tuple[ServerFacts, list[ModelOffer]]:
    """Wait for the server and detect its properties and models. Raises `ConfigError` if it is not available in time."""
    client = make_client(config)
    try:
        listed = await _wait_for_models(client, config, clock or SystemClock())
        facts = await _facts(client, config, kind_of(listed))
        offers = offers_of(config, listed)
        if not config.takes_text and facts.kind is ServerKind.LLAMA_CPP and offers[0].context_length is None:
            offers = [await _with_context(client, offers[0])]
        logger.info("%s serves %s (%s)", config.url, ", ".join(one.model for one in offers), facts.kind.value)
        return facts, offers
    finally:
        client.close()


async def _wait_for_models(client: HttpClient, config: ProxyConfig, clock: Clock) -> list[dict[str, Any]]:
    began = clock.now()
    logged_at = began - PROGRESS_S
    while True:
        try:
            status, body = await get(client, config.api("/models"))
            listed = models_in(body) if status == 200 else []
            if listed:
                return listed
            if status == 404 and config.models:
                return []  # The server has no model list, and needs none.
            if 400 <= status < 500 and status not in (408, 425, 429):
                raise ConfigError(f"--url {config.url}: {config.api('/models')}: {status} {message_of(body)}")
            why = "no model is listed yet" if status == 200 else f"status {status}"
        except WorkerUnavailable as error:
            why = str(error)
        now = clock.now()
        if now - began >= config.ready_timeout_s:
            raise ConfigError(f"--url {config.url}: not available within {config.ready_timeout_s:g} s: {why}")
        if now - logged_at >= PROGRESS_S:
            logged_at = now
            logger.info("waiting for %s for %.0f s: %s", config.url, now - began, why)
        await clock.sleep(min(RETRY_S, config.ready_timeout_s))


async def get(client: HttpClient, path: str) -> tuple[int, bytes]:
    """Return the status and body of a small page. Raises `WorkerUnavailable`."""
    async with client.request("GET", path, deadlines=Deadlines(LOOK_S, LOOK_S, LOOK_S)) as answer:
        return answer.status, await answer.read(PAGE_BYTES_MAX)


def models_in(body: bytes) -> list[dict[str, Any]]:
    """Return the entries of `/v1/models`. Raises `ConfigError` for a malformed list."""
    try:
        data = json_decode(body).get("data")
    except (*UNREADABLE, AttributeError):
        data = None
    if not isinstance(data, list) or not all(isinstance(one, dict) and one.get("id") for one in data):
        raise ConfigError(f"--url: malformed model list {body[:80]!r}: expected OpenAI's form")
    return data


def kind_of(listed: Sequence[dict[str, Any]]) -> ServerKind:
    """Return the kind of server, from its list of models."""
    owners = {str(one.get("owned_by") or "").lower() for one in listed}
    return next((kind for kind in ServerKind if kind.value in owners), ServerKind.OTHER)


def offers_of(config: ProxyConfig, listed: Sequence[dict[str, Any]]) -> list[ModelOffer]:
    """Return the models to serve. Raises `ConfigError` for one that the server does not list."""
    known = {str(one["id"]): one for one in listed}
    wanted = [*config.models, *(one for one in config.embedding_models if one not in config.models)]
    if not config.models:
        wanted = [*(name for name in known if name not in config.embedding_models), *config.embedding_models]
    missing = [name for name in wanted if known and name not in known]
    if missing:
        raise ConfigError(f"--model {missing[0]}: not listed by the server, which has {', '.join(known) or 'none'}")
    names = config.served_model_names or wanted
    if len(names) != len(wanted):
        raise ConfigError(f"--served-model-name: {len(names)} names for {len(wanted)} models: {', '.join(wanted)}")
    if not config.takes_text and len(wanted) > 1:
        raise ConfigError(f"--model is missing: --model-path requires exactly one of {', '.join(wanted)}")
    return [
        ModelOffer(
            model=model,
            name=name,
            embeds=model in config.embedding_models,
            context_length=config.context_length or _length(known.get(model, {})),
        )
        for model, name in zip(wanted, names, strict=True)
    ]


def _length(entry: dict[str, Any]) -> int | None:
    value = entry.get("max_model_len") or entry.get("context_length")
    return value if isinstance(value, int) and value > 0 else None


async def _facts(client: HttpClient, config: ProxyConfig, kind: ServerKind) -> ServerFacts:
    health = config.health_path
    if health is None:
        status, _ = await _try(client, "/health")
        health = "/health" if status == 200 else config.api("/models")
    version: tuple[int, ...] = ()
    block_tokens, blocks, ranks = config.kv_cache_block_size, config.total_kv_blocks, 1
    if kind is ServerKind.VLLM:
        _, body = await _try(client, "/version")
        version = version_of(_object(body).get("version"))
    elif kind is ServerKind.SGLANG:
        info = await _sglang_info(client)
        version = version_of(info.get("version"))
        page, tokens = info.get("page_size"), info.get("max_total_num_tokens")
        ranks = info["dp_size"] if isinstance(info.get("dp_size"), int) and info["dp_size"] > 0 else 1
        if isinstance(page, int) and page > 0:
            block_tokens = block_tokens or page
            if isinstance(tokens, int):
                blocks = blocks or tokens // page
    has_metrics = False
    if config.metrics_path:
        status, body = await _try(client, config.metrics_path)
        has_metrics = status == 200
        shape = cache_shape(samples_of(body.decode("utf-8", "replace"))) if has_metrics else None
        if shape is not None:
            block_tokens, blocks, ranks = block_tokens or shape.block_tokens, blocks or shape.blocks, shape.ranks
    return ServerFacts(
        kind=kind,
        version=version,
        health_path=health,
        has_metrics=has_metrics,
        block_tokens=block_tokens,
        total_blocks=blocks,
        ranks=ranks,
    )


async def _sglang_info(client: HttpClient) -> dict[str, Any]:
    for path in ("/server_info", "/get_server_info"):  # Newer and older versions.
        status, body = await _try(client, path)
        if status == 200:
            return _object(body)
    return {}


async def _with_context(client: HttpClient, offer: ModelOffer) -> ModelOffer:
    """Return the offer with the context length of a llama.cpp slot."""
    _, body = await _try(client, "/props")
    settings = _object(body).get("default_generation_settings")
    length = settings.get("n_ctx") if isinstance(settings, dict) else None
    if not isinstance(length, int) or length < 1:
        return offer
    return ModelOffer(model=offer.model, name=offer.name, embeds=offer.embeds, context_length=length)


async def _try(client: HttpClient, path: str) -> tuple[int, bytes]:
    """Return an optional page; status 0 if the request fails."""
    try:
        async with asyncio.timeout(LOOK_S):
            return await get(client, path)
    except (WorkerUnavailable, TimeoutError):
        return 0, b""


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json_decode(body)
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


def version_of(text: Any) -> tuple[int, ...]:
    """Return the numbers at the start of a version; empty if there are none, as for a development build."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text) if isinstance(text, str) else None
    return () if numbers is None else tuple(int(one) for one in numbers[1].split("."))


def token_api_of(config: ProxyConfig, facts: ServerFacts) -> TokenApi:
    """Return the API of `--token-api`, or the server's default."""
    return facts.token_api if config.token_api == AUTO else TokenApi(config.token_api)
