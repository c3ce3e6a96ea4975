"""PodPicker: picks engine pods of an InferencePool without a Dynamo runtime (`DYN_EPP_MODE=standalone`).

Each ready pod is a worker of an embedded selection service, which follows its KV events; prompts are tokenized by the
engine's render endpoint. Replicas of the picker exchange their active requests.
"""

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.core.boundaries import Rollback
from dynamo.core.errors import (
    DynamoException,
    HttpError,
    InvalidArgument,
    NotFound,
    NotReady,
    Overloaded,
    SelectionServiceError,
)
from dynamo.core.tasks import TaskOwner
from dynamo.epp.addresses import is_in
from dynamo.epp.config import EppOptions
from dynamo.epp.peers import ServicePeers
from dynamo.epp.phases import PickRequest
from dynamo.epp.picker import EndpointChoice, no_worker, routing_headers
from dynamo.epp.pool import PoolPods
from dynamo.epp.renderer import Renderer
from dynamo.k8s.informer import ObjectSource
from dynamo.protocols.nvext import NvExt
from dynamo.routing.services.selection import SelectionService
from dynamo.serving.request_headers import new_id, with_headers

logger = logging.getLogger(__name__)

ROUTED_PATHS = ("/chat/completions", "/completions")


class RoutedBody(msgspec.Struct):
    """Fields of a request that affect its routing; the engine checks all others."""

    model: str = ""
    nvext: NvExt | None = None
    prompt: Any = None


decode_body = msgspec.json.Decoder(RoutedBody).decode


class PodPicker:
    """Picker of one pool."""

    def __init__(
        self, options: EppOptions, source: ObjectSource, service: SelectionService, renderer: Renderer
    ) -> None:
        self._options = options
        self._service = service
        self._renderer = renderer
        self._model = options.model_name or ""
        self._registered: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._turn = itertools.count()
        namespace = options.pod_namespace
        self._pods = PoolPods(source, namespace, options.pool_name or "", self._changed.set)
        self._peers: ServicePeers | None = None
        self._peer_urls: set[str] = set()
        if options.peer_service:
            self._peers = ServicePeers(source, namespace, options.peer_service, options.pod_ip or "", self._set_peers)
        self._tasks = TaskOwner("endpoint picker")

    async def start(self) -> None:
        """Start to follow the pool and the replicas."""
        await self._service.start()
        self._pods.start()
        if self._peers is not None:
            self._peers.start()
        self._tasks.supervise(self._follow, "workers")

    async def close(self) -> None:
        """Stop."""
        await self._tasks.cancel_and_wait()
        if self._peers is not None:
            await self._peers.close()
        await self._pods.close()
        await self._service.close()
        self._renderer.close()

    @property
    def is_ready(self) -> bool:
        """Whether a worker is registered and the replicas are known."""
        return bool(self._registered) and (self._peers is None or self._peers.is_synced)

    async def pick(self, request: PickRequest) -> EndpointChoice:
        """Choose a pod. Raises `DynamoException`."""
        path = request.path.partition("?")[0]
        if not request.body or not path.endswith(ROUTED_PATHS):
            return self._any(request.subset)
        body = self._decoded(request)
        tokens = await self._renderer.tokens(path, bytes(request.body))
        allowed = [one for one, address in self._registered.items() if is_in(address, request.subset)]
        if not allowed:
            raise no_worker(request.subset)
        hints = None if body.nvext is None else body.nvext.agent_hints
        selection_id = new_id()
        prompt = {
            "model_name": self._model,
            "token_ids": tokens,
            "selection_id": selection_id,
            "allowed_worker_ids": None if request.subset is None else allowed,
            "cache_salt": None if body.nvext is None else body.nvext.cache_salt,
            "priority_jump": max(0.0, float((hints and hints.priority) or 0)),
            "strict_priority": (hints and hints.strict_priority) or 0,
        }
        try:
            chosen = await self._service.select_and_reserve(prompt)
        except SelectionServiceError as error:
            raise in_our_form(error) from None
        with Rollback(lambda: self._finish(selection_id)):
            return self._choice(chosen, selection_id)

    def _choice(self, chosen: Mapping[str, Any], selection_id: str) -> EndpointChoice:
        return EndpointChoice(
            chosen["endpoint"],
            routing_headers(chosen["worker_id"], chosen["dp_rank"]),
            self._model,
            lambda: self._act(self._service.prefill_complete(selection_id)),
            lambda: self._finish(selection_id),
        )

    def _decoded(self, request: PickRequest) -> RoutedBody:
        try:
            body = decode_body(request.body)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"invalid request body: {error}") from None
        if body.model != self._model:
            raise NotFound(f"Model not found: {body.model!r}; served: {self._model}")
        body.nvext = with_headers(body.nvext, request.headers)
        return body

    def _any(self, subset: frozenset[str] | None) -> EndpointChoice:
        able = sorted(address for address in self._registered.values() if is_in(address, subset))
        if not able:
            raise no_worker(subset)
        return EndpointChoice(able[next(self._turn) % len(able)], {})

    def _finish(self, selection_id: str) -> None:
        self._act(self._service.free_reservation(selection_id))

    def _act(self, work: Any) -> None:
        self._tasks.start(self._ignoring_absence(work), "reservation")

    @staticmethod
    async def _ignoring_absence(work: Any) -> None:
        """Await a change of a reservation, which is gone if it ended before or its worker left."""
        try:
            await work
        except SelectionServiceError as error:
            logger.debug("%s", error)

    # Workers and replicas.

    async def _follow(self) -> None:
        """Register the ready pods forever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._pods.addresses
            for worker_id in [one for one, address in self._registered.items() if wanted.get(one) != address]:
                del self._registered[worker_id]
                await self._service.delete_worker(worker_id)
            for worker_id, address in wanted.items():
                if worker_id not in self._registered:
                    await self._register(worker_id, address)

    async def _register(self, worker_id: int, address: str) -> None:
        options, host = self._options, address.rpartition(":")[0]
        replay = options.kv_event_replay_port
        worker = {
            "worker_id": worker_id,
            "model_name": self._model,
            "endpoint": address,
            "kv_events_endpoint": f"tcp://{host}:{options.kv_event_port}",
            "replay_endpoint": None if replay is None else f"tcp://{host}:{replay}",
            "block_size": options.block_size,
            "max_num_batched_tokens": options.batched_tokens,
            "total_kv_blocks": options.total_kv_blocks,
        }
        try:
            await self._service.upsert_worker(worker)
        except (SelectionServiceError, InvalidArgument) as error:
            logger.warning("worker %s cannot be used: %s", address, error)
        else:
            self._registered[worker_id] = address

    def _set_peers(self, addresses: set[str]) -> None:
        urls = {
            f"tcp://[{ip}]:{self._options.replica_sync_port}"
            if ":" in ip
            else f"tcp://{ip}:{self._options.replica_sync_port}"
            for ip in addresses
        }
        for change, method in (
            (urls - self._peer_urls, self._service.register_replica_peer),
            (self._peer_urls - urls, self._service.deregister_replica_peer),
        ):
            for url in sorted(change):
                self._tasks.start(self._connect(method(url), url), "replica")
        self._peer_urls = urls

    @staticmethod
    async def _connect(work: Any, url: str) -> None:
        try:
            await work
        except HttpError as error:
            logger.warning("replica %s: %s", url, error)


def in_our_form(error: SelectionServiceError) -> DynamoException:
    """Return a selection service's error as the errors of requests are given."""
    match error.kind:
        case "invalid_request":
            return InvalidArgument(str(error))
        case "overloaded":
            return Overloaded(str(error))
        case "not_ready" | "not_found":
            return NotReady(str(error))
        case _:
            return error
