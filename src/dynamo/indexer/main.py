"""Standalone KV indexer: `python -m dynamo.indexer`, its options, HTTP API, metrics and access log."""

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from typing import Annotated, Any

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.config import load, option, read_bool, setting
from dynamo.core.errors import ConfigError, HttpError, InvalidArgument
from dynamo.core.metrics import CONTENT_TYPE, MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.kv_events.engine_subscriber import Status, check_endpoint
from dynamo.kv_router.config import BLOCKS_MAX
from dynamo.kv_router.runs import pack
from dynamo.routing.services.indexed_models import IndexedModels
from dynamo.routing.services.indexer_peers import Peers
from dynamo.runtime.json_service import AnsweredRequest, HttpCall, JsonRoutes, TextBody
from dynamo.runtime.run_service import run_service
from dynamo.text.multimodal.routing_hashes import hashes_of
from dynamo.tokens.hashing import U64

logger = logging.getLogger(__name__)

OK = {"status": "ok"}
DEFAULT_GROUP = "default"
PREFIX = "dynamo_kvindexer_"
BUCKETS = tuple(1e-4 * 2**step for step in range(20))
METRICS_TYPE = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class InitialWorker:
    """A worker that is named on the command line."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerOptions:
    """Standalone KV indexer: follows engines' KV events and returns the workers' cached prefixes."""

    block_size: int | None = option(None, "--block-size", None, "Tokens of a KV block of the workers in --workers")
    port: int = option(8090, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Accepted for compatibility; has no effect: one event loop applies the events"
    )
    workers: str = option("", "--workers", None, 'Workers to follow from the start: "id[:rank]=tcp://host:port,…"')
    model_name: str = option("default", "--model-name", None, "Model of the workers in --workers")
    routing_group: str = option("default", "--routing-group", None, "Routing group of the workers in --workers")
    peers: list[str] = option([], "--peers", None, "URLs of other indexers whose index is copied at the start")
    access_log: str | None = option(None, "--access-log", None, "Access log file: one JSON line per request")
    trace_id_header: str = option("x-trace-id", "--trace-id-header", None, "Request header to log as the trace id")
    access_log_local_time: bool = option(
        False, "--access-log-local-time", None, "Use local time in the access log instead of UTC"
    )
    index_blocks_max: int = option(
        BLOCKS_MAX,
        "--router-index-max-blocks",
        "DYN_ROUTER_INDEX_MAX_BLOCKS",
        "Maximum blocks of each model's index; the least recently used ones are dropped",
    )

    def __post_init__(self) -> None:
        if self.workers and not self.block_size:
            raise ConfigError("--workers: requires --block-size of at least 1")
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be at least 1")
        if self.index_blocks_max < 1:
            raise ConfigError(f"--router-index-max-blocks {self.index_blocks_max}: must be at least 1")
        self.initial_workers()

    def initial_workers(self) -> list[InitialWorker]:
        """Return the workers of `--workers`. Raises `ConfigError`."""
        found = []
        for part in filter(None, (one.strip() for one in self.workers.split(","))):
            name, is_named, endpoint = part.partition("=")
            instance, _, rank = name.partition(":")
            if not is_named or not instance.isdecimal() or not (rank or "0").isdecimal():
                raise ConfigError(f"--workers {part}: expected id=address or id:rank=address")
            try:
                check_endpoint(endpoint)
            except InvalidArgument as error:
                raise ConfigError(f"--workers {part}: {error}") from None
            found.append(InitialWorker(int(instance), int(rank or 0), endpoint))
        return found


class AccessLog:
    """The access log file. Raises `ConfigError` if it cannot be opened."""

    def __init__(self, path: str, trace_id_header: str, *, is_local_time: bool = False) -> None:
        self._path = path
        self._header = trace_id_header.lower()
        self._is_local_time = is_local_time
        self._file = self._open()

    def _open(self) -> TextIOWrapper:
        try:
            return open(self._path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--access-log {self._path}: {error.strerror}") from None

    def note(self, served: AnsweredRequest) -> None:
        """Write the line of a request. A write error is logged and does not affect the request."""
        now = datetime.now().astimezone() if self._is_local_time else datetime.now(UTC)
        line = {
            "time": now.isoformat(timespec="milliseconds"),
            "method": served.method,
            "path": served.route,
            "status": served.status,
            "duration_ms": round(served.seconds * 1e3, 3),
            "trace_id": served.headers.get(self._header),
        }
        try:
            self._file.write(json_encode(line).decode() + "\n")
        except OSError as error:
            logger.warning("--access-log %s: %s", self._path, error)

    def reopen(self) -> None:
        """Continue in a new file of the same name."""
        self._file.close()
        self._file = self._open()

    def close(self) -> None:
        self._file.close()


class IndexerMetrics:
    """Metrics of requests, models and listeners."""

    def __init__(self, registry: MetricsRegistry, models: IndexedModels) -> None:
        self._seconds = registry.histogram(
            PREFIX + "request_duration_seconds", "HTTP request latency", ("endpoint",), BUCKETS
        )
        self._requests = registry.counter(PREFIX + "requests_total", "HTTP requests", ("endpoint", "method"))
        self._errors = registry.counter(
            PREFIX + "errors_total", "HTTP requests that were refused or failed", ("endpoint", "status_class")
        )
        registry.gauge(PREFIX + "models", "Followed models and routing groups").labels().follow(
            lambda: float(len(models.models))
        )
        listeners = registry.gauge(PREFIX + "listeners", "ZMQ listeners by status", ("status",))
        for status in Status:
            listeners.labels(status=status.value).follow(partial(_count, models, status))
        registry.gauge(PREFIX + "blocks", "Blocks in all indexes").labels().follow(
            lambda: float(sum(one.index.size for one in models.models.values()))
        )
        registry.gauge(
            PREFIX + "lost_messages", "KV event messages that were missed and could not be replayed"
        ).labels().follow(lambda: float(sum(one.events.lost for one in models.listeners())))

    def served(self, served: AnsweredRequest) -> None:
        """Record a served request."""
        if served.status in (404, 405) and not served.is_routed:
            return
        self._seconds.labels(endpoint=served.route).observe(served.seconds)
        self._requests.labels(endpoint=served.route, method=served.method).inc()
        if served.status >= 400:
            self._errors.labels(endpoint=served.route, status_class=f"{served.status // 100}xx").inc()


def _count(models: IndexedModels, status: Status) -> float:
    return float(sum(one.status is status for one in models.listeners()))


Id = Annotated[int, msgspec.Meta(ge=0)]


class FollowBody(msgspec.Struct):
    """A rank to follow."""

    instance_id: Id
    endpoint: str
    model_name: str
    block_size: Id
    routing_group: str = DEFAULT_GROUP
    dp_rank: Id | None = None
    replay_endpoint: str | None = None
    additional_salt: str | None = None


class UnfollowBody(msgspec.Struct):
    """An instance, or one of its ranks, to stop following."""

    instance_id: Id
    model_name: str
    routing_group: str = DEFAULT_GROUP
    dp_rank: Id | None = None


class ListenerBody(msgspec.Struct):
    """Rank whose listener is paused or resumed."""

    instance_id: int
    dp_rank: int | None = None


class QueryBody(msgspec.Struct):
    """A prompt as tokens."""

    token_ids: list[int]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: str | None = None
    block_mm_infos: list[Any] | None = None


class QueryByHashBody(msgspec.Struct):
    """A prompt as block hashes."""

    block_hashes: list[int]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    cache_salt: str | None = None


class IndexerPeerBody(msgspec.Struct):
    """Another indexer."""

    url: str


class IndexerRoutes:
    """Handlers of the followed models."""

    def __init__(self, models: IndexedModels, peers: Peers, registry: MetricsRegistry, log: AccessLog | None) -> None:
        self._models = models
        self._peers = peers
        self._page = MetricsPage(registry)
        self._log = log
        self._metrics = IndexerMetrics(registry, models)
        self.routes = JsonRoutes(errors_as_text=True, names_missing_routes=False)
        self.routes.observer = self._served
        add = self.routes.add
        add("GET", "/health", self.health)
        add("GET", "/metrics", self.metrics)
        add("GET", "/workers", self.workers)
        add("GET", "/dump", self.dump)
        add("GET", "/peers", self.peers)
        add("POST", "/register", self.register, FollowBody)
        add("POST", "/unregister", self.unregister, UnfollowBody)
        add("POST", "/query", self.query, QueryBody)
        add("POST", "/query_by_hash", self.query_by_hash, QueryByHashBody)
        add("POST", "/register_peer", self.register_peer, IndexerPeerBody)
        add("POST", "/deregister_peer", self.deregister_peer, IndexerPeerBody)
        add("POST", "/reopen_logs", self.reopen_logs)
        if setting("DYN_KV_INDEXER_TEST_ENDPOINTS", False, read_bool):
            add("POST", "/test/pause_listener", self.pause_listener, ListenerBody)
            add("POST", "/test/resume_listener", self.resume_listener, ListenerBody)

    def _served(self, served: Any) -> None:
        self._metrics.served(served)
        if self._log is not None:
            self._log.note(served)

    async def health(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, None

    async def metrics(self, call: HttpCall[None]) -> tuple[int, Any]:
        content_type, body = await self._page.respond(call.headers.get("accept", ""))
        return 200, TextBody(body, METRICS_TYPE if content_type == CONTENT_TYPE else content_type)

    async def workers(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._models.workers(call.query.get("model_name"), call.query.get("routing_group"))

    async def dump(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._models.dump()

    async def register(self, call: HttpCall[FollowBody]) -> tuple[int, Any]:
        body = call.body
        self._models.follow(
            body.instance_id,
            body.dp_rank or 0,
            body.endpoint,
            (body.model_name, body.routing_group),
            body.block_size,
            replay_endpoint=body.replay_endpoint,
            salt=body.additional_salt,
        )
        return 201, OK

    async def unregister(self, call: HttpCall[UnfollowBody]) -> tuple[int, Any]:
        body = call.body
        self._models.leave(body.instance_id, (body.model_name, body.routing_group), body.dp_rank)
        return 200, OK

    async def query(self, call: HttpCall[QueryBody]) -> tuple[int, Any]:
        body = call.body
        place = (body.model_name, body.routing_group)
        model = self._models.models.get(place)
        size = 1 if model is None else model.block_size
        try:
            hashes = hashes_of(
                body.token_ids,
                size,
                block_mm_infos=body.block_mm_infos,
                lora_name=body.lora_name,
                cache_salt=body.cache_salt,
            )
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None
        return 200, self._models.find(place, pack(hashes))

    async def query_by_hash(self, call: HttpCall[QueryByHashBody]) -> tuple[int, Any]:
        body = call.body
        if body.cache_salt is not None:
            raise HttpError(400, "cache_salt: not allowed with block_hashes, which already contain it")
        blocks = pack([one & U64 for one in body.block_hashes])
        return 200, self._models.find((body.model_name, body.routing_group), blocks)

    async def peers(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._peers.urls

    async def register_peer(self, call: HttpCall[IndexerPeerBody]) -> tuple[int, Any]:
        self._peers.add(call.body.url)
        return 201, OK

    async def deregister_peer(self, call: HttpCall[IndexerPeerBody]) -> tuple[int, Any]:
        if not self._peers.remove(call.body.url):
            raise HttpError(404, "peer not found")
        return 200, OK

    async def pause_listener(self, call: HttpCall[ListenerBody]) -> tuple[int, Any]:
        self._models.pause(call.body.instance_id, call.body.dp_rank or 0)
        return 200, OK

    async def resume_listener(self, call: HttpCall[ListenerBody]) -> tuple[int, Any]:
        self._models.resume(call.body.instance_id, call.body.dp_rank or 0)
        return 200, OK

    async def reopen_logs(self, call: HttpCall[None]) -> tuple[int, Any]:
        if self._log is not None:
            self._log.reopen()
        return 200, OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the indexer until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(IndexerOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.indexer")
    return run_service("indexer", serve(options))


@asynccontextmanager
async def serve(options: IndexerOptions) -> AsyncIterator[None]:
    """Follow engines, listen, and copy a peer's index; close all at the end of the block."""
    log = None
    if options.access_log is not None:
        log = AccessLog(options.access_log, options.trace_id_header, is_local_time=options.access_log_local_time)
    models = IndexedModels(blocks_max=options.index_blocks_max)
    try:
        peers = _follow(options, models)
        routes = IndexerRoutes(models, peers, MetricsRegistry(), log).routes
        async with routes.serve(options.port) as url:
            await peers.recover(models)
            models.gate.set()
            logger.info("indexer ready: %s", url)
            yield
    finally:
        await models.close()
        if log is not None:
            log.close()


def _follow(options: IndexerOptions, models: IndexedModels) -> Peers:
    """Follow the workers of the command line; return its peers. Raises `ConfigError`."""
    try:
        for worker in options.initial_workers():
            place = (options.model_name, options.routing_group)
            models.follow(worker.instance_id, worker.dp_rank, worker.endpoint, place, options.block_size or 0)
        return Peers(options.peers)
    except HttpError as error:
        raise ConfigError(error.message) from None
