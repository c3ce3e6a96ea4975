"""Standalone worker selection: `python -m dynamo.select_service`, its options and HTTP API."""

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, HttpError, InvalidArgument, SelectionServiceError
from dynamo.routing.services.indexer_peers import URL_SCHEMES
from dynamo.routing.services.pending_selections import BYTES_MAX, ENTRIES_MAX, TTL_S, SelectionCacheConfig
from dynamo.routing.services.selection import AFFINITY_MAX_S, SelectionService
from dynamo.routing.services.selection_requests import PromptBody, ReservationBody
from dynamo.routing.services.worker_catalog import Id, WorkerBody
from dynamo.routing.settings import TrackingOptions
from dynamo.routing.sync.replica_peers import ReplicaOptions, add_peer_routes
from dynamo.runtime.json_service import Handler, HttpCall, JsonRoutes
from dynamo.runtime.run_service import run_service

logger = logging.getLogger(__name__)

OK = {"status": "ok"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectOptions(ReplicaOptions, TrackingOptions):
    """Standalone worker selection: chooses among registered workers, without a Dynamo runtime."""

    port: int = option(8092, "--port", None, "HTTP port")
    threads: int = option(
        4, "--threads", None, "Accepted for compatibility; has no effect: one event loop applies the events"
    )
    indexer_peers: list[str] = option(
        [], "--indexer-peers", None, "URLs of other selection services or indexers whose index is copied at the start"
    )
    session_affinity_ttl_secs: float | None = option(
        None,
        "--session-affinity-ttl-secs",
        None,
        "Idle time after which a session (session_id) loses its worker, in seconds; enables session affinity",
    )
    selection_cache_ttl_secs: float = option(
        TTL_S, "--selection-cache-ttl-secs", None, "Time in which a selection can be reserved, in seconds"
    )
    selection_cache_max_entries: int = option(
        ENTRIES_MAX, "--selection-cache-max-entries", None, "Maximum number of selections that can be reserved"
    )
    selection_cache_max_bytes: int = option(
        BYTES_MAX, "--selection-cache-max-bytes", None, "Approximate maximum memory of these selections, in bytes"
    )
    assume_kv_reuse: bool = option(
        True, "--router-assume-kv-reuse", None, "Count the common prefix of concurrent requests on a worker once"
    )

    def __post_init__(self) -> None:
        ReplicaOptions.__post_init__(self)
        self.check_tracking()
        for url in self.indexer_peers:
            if not url.startswith(URL_SCHEMES):
                raise ConfigError(f"--indexer-peers {url}: expected http://host:port")
        ttl_s = self.session_affinity_ttl_secs
        if ttl_s is not None and not 1 <= ttl_s <= AFFINITY_MAX_S:
            raise ConfigError(f"--session-affinity-ttl-secs {ttl_s:g}: must be from 1 to {AFFINITY_MAX_S}")
        for flag, value in (
            ("--selection-cache-ttl-secs", self.selection_cache_ttl_secs),
            ("--selection-cache-max-entries", self.selection_cache_max_entries),
            ("--selection-cache-max-bytes", self.selection_cache_max_bytes),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: must be greater than 0")


class NewWorkerBody(WorkerBody, kw_only=True):
    """A worker with its id."""

    worker_id: Id


class OutputBlockBody(msgspec.Struct):
    """One more block of an output."""

    decay_fraction: float | None = None


class SelectRoutes:
    """Handlers of one selection service."""

    def __init__(self, service: SelectionService) -> None:
        self._service = service
        self.routes = JsonRoutes()
        for method, path, handler, body in (
            ("GET", "/health", self.health, None),
            ("GET", "/ready", self.ready, None),
            ("GET", "/workers", self.workers, None),
            ("POST", "/workers", self.upsert, NewWorkerBody),
            ("PATCH", "/workers/{}", self.update, dict),
            ("DELETE", "/workers/{}", self.delete, None),
            ("GET", "/loads", self.loads, None),
            ("GET", "/dump", self.dump, None),
            ("POST", "/select", self.answered(service.select), PromptBody),
            ("POST", "/select_and_reserve", self.answered(service.select_and_reserve), PromptBody),
            ("POST", "/overlap_scores", self.answered(service.overlap_scores), PromptBody),
            ("POST", "/potential_loads", self.answered(service.potential_loads), PromptBody),
            ("POST", "/reservations", self.answered(service.create_reservation, 201), ReservationBody),
            ("POST", "/reservations/{}/prefill_complete", self.prefill_complete, None),
            ("POST", "/reservations/{}/output_block", self.output_block, OutputBlockBody),
            ("DELETE", "/reservations/{}", self.free, None),
        ):
            self.routes.add(method, path, refused(handler), body)
        add_peer_routes(self.routes, service.peers)

    def answered(self, method: Callable[[Any], Awaitable[Any]], status: int = 200) -> Handler:
        """Return the handler of a route that calls one method of the service."""

        async def answer(call: HttpCall[Any]) -> tuple[int, Any]:
            return status, await method(call.body)

        return answer

    async def health(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, OK

    async def ready(self, call: HttpCall[None]) -> tuple[int, Any]:
        state = self._service.ready()
        return (200 if state["ready"] else 503), state

    async def workers(self, call: HttpCall[None]) -> tuple[int, Any]:
        query = call.query
        return 200, self._service.list_workers(
            model_name=query.get("model_name"), routing_group=query.get("routing_group")
        )

    async def upsert(self, call: HttpCall[NewWorkerBody]) -> tuple[int, Any]:
        return 201, await self._service.upsert_worker(call.body)

    async def update(self, call: HttpCall[dict[str, Any]]) -> tuple[int, Any]:
        return 200, await self._service.update_worker(worker_of(call.path), call.body)

    async def delete(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, await self._service.delete_worker(worker_of(call.path))

    async def loads(self, call: HttpCall[None]) -> tuple[int, Any]:
        query = call.query
        return 200, self._service.loads(model_name=query.get("model_name"), routing_group=query.get("routing_group"))

    async def dump(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._service.dump()

    async def prefill_complete(self, call: HttpCall[None]) -> tuple[int, Any]:
        await self._service.prefill_complete(call.path)
        return 200, OK

    async def output_block(self, call: HttpCall[OutputBlockBody]) -> tuple[int, Any]:
        self._service.add_output_block(call.path, decay_fraction=call.body.decay_fraction)
        return 200, OK

    async def free(self, call: HttpCall[None]) -> tuple[int, Any]:
        await self._service.free_reservation(call.path)
        return 200, OK


def worker_of(text: str) -> int:
    """Return the worker id in a path. Raises `HttpError`."""
    if not text.isdecimal():
        raise HttpError(400, f"worker id {text!r}: expected a number")
    return int(text)


def refused(handler: Handler) -> Handler:
    """Convert the service's errors to HTTP errors."""

    async def answer(call: HttpCall[Any]) -> tuple[int, Any]:
        try:
            return await handler(call)
        except SelectionServiceError as error:
            raise HttpError(error.status_code, str(error)) from None
        except InvalidArgument as error:
            raise HttpError(400, str(error)) from None

    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = load(SelectOptions, sys.argv[1:] if argv is None else argv, prog="python -m dynamo.select_service")
    return run_service("select-service", serve(options))


@asynccontextmanager
async def serve(options: SelectOptions) -> AsyncIterator[None]:
    """Listen, copy a peer's index and follow engines; close all at the end of the block."""
    service = SelectionService(
        indexer_peers=options.indexer_peers,
        replica_sync_port=options.replica_sync_port,
        replica_sync_peers=options.replica_sync_peers,
        selection_cache=SelectionCacheConfig(
            ttl_secs=options.selection_cache_ttl_secs,
            max_entries=options.selection_cache_max_entries,
            max_bytes=options.selection_cache_max_bytes,
        ),
        session_affinity_ttl_secs=options.session_affinity_ttl_secs,
        assume_kv_reuse=options.assume_kv_reuse,
        tracking_key=options.tracking_key(),
    )
    try:
        async with SelectRoutes(service).routes.serve(options.port) as url:
            await service.start()
            logger.info("selection service ready: %s", url)
            yield
    finally:
        await service.close()
