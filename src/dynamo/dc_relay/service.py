"""RelayService: the gRPC server of a relay, with gRPC health checks and reflection.

Plaintext and without authentication, as upstream's: across a trust boundary, place a proxy with mutual TLS before it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dynamo.core.boundaries import logged
from dynamo.core.errors import ConfigError, InvalidArgument, StartupError
from dynamo.core.extras import install_command
from dynamo.dc_relay.conversion import RelayConversion, UnsupportedIdentity, check_producer
from dynamo.dc_relay.grpc_probes import probe_handlers
from dynamo.dc_relay.host import CatalogEntry, RelayHost
from dynamo.dc_relay.messages import CLASSES, CONTRACT_MARKER, METHODS, SERVICE
from dynamo.dc_relay.pool import RelayPool
from dynamo.dc_relay.publication import FilterFrame, FilterFrameKind, SubscriberEnded

try:
    import grpc
except ImportError:
    raise ConfigError(f"KvDcRelay bind: requires gRPC; install it: {install_command('grpc')}") from None

logger = logging.getLogger(__name__)

REASON_KEY = "kv-relay-error-reason"
SUBSCRIBER_ID_BYTES_MAX = 128
STOP_S = 1.0


class RelayError(Exception):
    """Status of a refused or ended call."""

    def __init__(self, status: str, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class RelayService:
    """gRPC server of one relay, from `start` to `stop`."""

    def __init__(self, host: RelayHost, bind: str) -> None:
        self.is_serving = False
        self.address: str | None = None
        """Address of the listener, once it is bound."""
        self._host = host
        self._bind = bind
        self._limits = host.config.limits
        self._conversion = RelayConversion(host)
        self._open: dict[str, int] = {}
        self._server: Any = None

    async def start(self) -> None:
        """Serve. Raises `StartupError` if the address cannot be bound."""
        limits = self._limits
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.max_send_message_length", limits.max_message_bytes),
                ("grpc.keepalive_time_ms", limits.keepalive_interval_ms),
                ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
            ]
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()), *probe_handlers(lambda: self.is_serving))
        )
        try:
            port = server.add_insecure_port(self._bind)
        except RuntimeError as error:
            raise StartupError(f"bind {self._bind}: cannot be bound for gRPC: {error}") from None
        self.address = f"{self._bind.rpartition(':')[0]}:{port}"
        await server.start()
        self._server, self.is_serving = server, True
        logger.info("KV relay serves at %s", self.address)

    async def stop(self) -> None:
        """End every stream and close the listener."""
        self.is_serving = False
        if self._server is not None:
            await self._server.stop(STOP_S)

    # Methods

    async def relay_info(self, request: Any, context: Any) -> Any:
        """Return the relay's identity."""
        return self._conversion.response("RelayInfo")

    async def watch_catalog(self, request: Any, context: Any) -> None:
        """Send the catalog, and again after each change."""
        published = self._host.catalog
        while True:
            revision = published.revision
            await context.write(self._conversion.catalog())
            await published.wait(revision)
            self._check_serving()

    async def watch_readiness(self, request: Any, context: Any) -> None:
        """Send the readiness, again after each change, and at intervals."""
        published = self._host.readiness
        while True:
            revision = published.revision
            await context.write(self._conversion.readiness())
            await published.wait(revision, self._limits.readiness_heartbeat_interval_ms / 1000)
            self._check_serving()

    async def watch_loads(self, request: Any, context: Any) -> None:
        """Send each window of loads."""
        loads = self._host.loads
        number = loads.number
        while True:
            number += 1
            window = await loads.get(number)
            self._check_serving()
            if window is None:
                raise RelayError(
                    "RESOURCE_EXHAUSTED", "SUBSCRIBER_LAGGED", "the subscriber does not keep up with loads"
                )
            await context.write(self._conversion.load(number, window))

    async def watch_pool(self, request: Any, context: Any) -> None:
        """Send a snapshot of the requested generation's filter, then its changes."""
        pool, entry = self._find(request)
        producer = self._conversion.producer(entry)
        limit = self._limits.max_subscribers_per_pool
        if pool.publication.subscribers >= limit:
            raise RelayError("RESOURCE_EXHAUSTED", "RESOURCE_LIMIT", f"the pool has {limit} subscribers")
        frames, subscriber = pool.publication.subscribe()
        try:
            for frame in frames:
                try:
                    async with asyncio.timeout(self._limits.snapshot_progress_timeout_ms / 1000):
                        await context.write(self._update(producer, frame))
                except TimeoutError:
                    raise RelayError(
                        "RESOURCE_EXHAUSTED", "SNAPSHOT_PROGRESS_TIMEOUT", "the subscriber does not read the snapshot"
                    ) from None
            sequence = frame.sequence
            while True:
                try:
                    async with asyncio.timeout(self._limits.pool_heartbeat_interval_ms / 1000):
                        frame = await subscriber.next()
                except TimeoutError:
                    frame = FilterFrame(FilterFrameKind.HEARTBEAT, sequence, sequence)
                sequence = frame.sequence
                await context.write(self._update(producer, frame))
        except SubscriberEnded as error:
            if error.is_lagged:
                raise RelayError("RESOURCE_EXHAUSTED", "SUBSCRIBER_LAGGED", str(error)) from None
            raise RelayError("UNAVAILABLE", "PUBLICATION_UNAVAILABLE", str(error)) from None
        finally:
            pool.publication.unsubscribe(subscriber)

    def _find(self, request: Any) -> tuple[RelayPool, CatalogEntry]:
        """Return the pool of a request. Raises `RelayError` unless its generation is the present one."""
        if not request.HasField("expected_producer"):
            raise RelayError("INVALID_ARGUMENT", "INVALID_REQUEST", "expected_producer: required")
        expected = request.expected_producer
        try:
            check_producer(expected)
        except UnsupportedIdentity as error:
            raise RelayError("FAILED_PRECONDITION", "UNSUPPORTED_FEATURE", str(error)) from None
        except InvalidArgument as error:
            raise RelayError("INVALID_ARGUMENT", "INVALID_REQUEST", str(error)) from None
        for entry in self._host.catalog.value:
            producer = self._conversion.producer(entry)
            if producer.pool_id == expected.pool_id:
                pool = self._host.pool(entry.plan.endpoint)
                if pool is None or producer != expected:
                    break
                return pool, entry
        else:
            raise RelayError("NOT_FOUND", "POOL_NOT_FOUND", "expected_producer: unknown pool_id")
        raise RelayError(
            "FAILED_PRECONDITION", "PRODUCER_CHANGED", "expected_producer: not the pool's present producer"
        )

    def _update(self, producer: Any, frame: FilterFrame) -> Any:
        return self._conversion.response(
            "FilterUpdate",
            producer=producer,
            base_sequence=frame.base_sequence,
            sequence=frame.sequence,
            send_ts_us=int(time.time() * 1e6),
            kind=int(frame.kind),
            payload=frame.payload,
        )

    def _check_serving(self) -> None:
        if not self.is_serving:
            raise RelayError("UNAVAILABLE", "PUBLICATION_UNAVAILABLE", "the relay shuts down")

    # gRPC interface

    def _handlers(self) -> dict[str, Any]:
        limits = self._limits
        streams = {
            "WatchKvPoolCatalog": (self.watch_catalog, limits.max_catalog_subscribers),
            "SubscribeKvPool": (self.watch_pool, limits.max_pool_streams_total),
            "SubscribeServingReadiness": (self.watch_readiness, limits.max_readiness_subscribers),
            "SubscribeKvPoolLoad": (self.watch_loads, limits.max_load_subscribers),
        }
        handlers = {
            name: grpc.unary_stream_rpc_method_handler(
                self._guarded(self._admitted(name, method, limit)),
                request_deserializer=CLASSES[f"{name}Request"].FromString,
                response_serializer=CLASSES[METHODS[name]].SerializeToString,
            )
            for name, (method, limit) in streams.items()
        }
        handlers["GetRelayInfo"] = grpc.unary_unary_rpc_method_handler(
            self._guarded(self.relay_info),
            request_deserializer=CLASSES["RelayInfoRequest"].FromString,
            response_serializer=CLASSES["RelayInfo"].SerializeToString,
        )
        return handlers

    def _admitted(
        self, name: str, method: Callable[[Any, Any], Awaitable[None]], limit: int
    ) -> Callable[[Any, Any], Awaitable[None]]:
        """Wrap a stream with the check of the subscriber's name and the limit of its kind."""

        async def serve(request: Any, context: Any) -> None:
            _check_subscriber(request.subscriber_id)
            with self._counted(name, limit):
                await method(request, context)

        return serve

    @contextmanager
    def _counted(self, name: str, limit: int) -> Iterator[None]:
        if self._open.get(name, 0) >= limit:
            raise RelayError("RESOURCE_EXHAUSTED", "RESOURCE_LIMIT", f"{name}: at most {limit} streams")
        self._open[name] = self._open.get(name, 0) + 1
        try:
            yield
        finally:
            self._open[name] -= 1

    def _guarded(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wrap a method with the request boundary."""

        async def serve(request: Any, context: Any) -> Any:
            error = RelayError("INTERNAL", "INTERNAL", "internal error")
            with logged(logger, "request of a relay subscriber failed"):
                try:
                    _check_contract(request)
                    return await method(request, context)
                except RelayError as refusal:
                    error = refusal
            return await _abort(context, error)

        return serve


def _check_contract(request: Any) -> None:
    if request.contract_marker != CONTRACT_MARKER:
        raise RelayError("FAILED_PRECONDITION", "CONTRACT_MISMATCH", f"contract_marker: must be {CONTRACT_MARKER:#x}")


def _check_subscriber(name: str) -> None:
    if (
        not name
        or len(name.encode()) > SUBSCRIBER_ID_BYTES_MAX
        or any(ord(one) < 32 or ord(one) == 127 for one in name)
    ):
        raise RelayError(
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            f"subscriber_id: must have 1 to {SUBSCRIBER_ID_BYTES_MAX} bytes and no control characters",
        )


async def _abort(context: Any, error: RelayError) -> None:
    reason = ((REASON_KEY, f"RELAY_ERROR_REASON_{error.reason}"),)
    await context.abort(grpc.StatusCode[error.status], str(error), reason)
