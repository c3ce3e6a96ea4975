"""Endpoint: a named service that this process serves or calls; Namespace and Component: the first parts of its name."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import json_encode, msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.core.loops import is_foreign
from dynamo.protocols.active_sequences import (
    MARK_PREFILL_COMPLETED,
    ActiveSequenceEvent,
    ActiveSequenceEvents,
    SequenceWorker,
)
from dynamo.protocols.discovery import INSTANCES, RESPONSE_FRAMES, EndpointId, Instance, record_key
from dynamo.runtime.client import Client
from dynamo.runtime.config import device_type, request_plane_codec
from dynamo.runtime.context import Context
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Handler
from dynamo.runtime.server import EndpointMetrics, Served, ServeOptions
from dynamo.runtime.streams import BidirectionalHandler, GeneratorFunction, GeneratorHandler

if TYPE_CHECKING:
    from dynamo.runtime.discovery.base import Discovery
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.event_plane.base import Publisher

logger = logging.getLogger(__name__)


TypedFamily = tuple[str, str, str, str, list[tuple[str, list[tuple[str, str]], float, float | None]]]
"""Metric family: name, help, type, unit, and samples of name, labels, value and timestamp."""

ACTIVE_SEQUENCES_TOPIC = "active_sequences_events"


class FirstTokenSource:
    """First tokens of one worker, published on `active_sequences_events`; `Endpoint.first_token_source` creates it."""

    def __init__(self, publisher: "Publisher", worker_id: int) -> None:
        self._publisher = publisher
        self._worker_id = worker_id

    def bind(self, context: Context, dp_rank: int | None = None) -> None:
        """Report the first token of this request, computed by this data-parallel rank."""
        context.on_first_token(lambda: self._report(context.id(), dp_rank or 0))

    def _report(self, request_id: str, dp_rank: int) -> None:
        worker = SequenceWorker(self._worker_id, dp_rank)
        event = ActiveSequenceEvent(request_id, worker, MARK_PREFILL_COMPLETED, router_id=self._worker_id)
        self._publisher.publish(msgpack_encode(ActiveSequenceEvents([event])))


class Serving:
    """Endpoint served by this process, until it is closed."""

    def __init__(self, runtime: "DistributedRuntime", instance: Instance, served: Served) -> None:
        self._runtime = runtime
        self._served = served
        self.instance = instance
        self._is_registered = False

    @property
    def inflight(self) -> int:
        return self._served.inflight

    async def register(self) -> None:
        """Register the instance, so that callers find it."""
        if not self._is_registered:
            await self._runtime.discovery.put(INSTANCES, self.instance.key, json_encode(self.instance))
            self._is_registered = True
            self._show(is_ready=True)

    async def unregister(self) -> None:
        """Deregister the instance; running and late requests are still served."""
        if self._is_registered:
            self._is_registered = False
            self._show(is_ready=False)
            await self._runtime.discovery.delete(INSTANCES, self.instance.key)

    def _show(self, *, is_ready: bool) -> None:
        if not self._served.options.is_internal:
            self._runtime.health.endpoints[self.instance.endpoint] = is_ready

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for running ones; return False if some still run after the timeout."""
        return await self._served.drain(timeout_s)

    def alive(self) -> None:
        """Record a step of the engine as a sign of life; it postpones the next health check."""
        self._served.alive()

    def cut(self) -> None:
        """Abort the running requests with an error that permits migration."""
        self._served.cut()

    async def close(self, drain_timeout_s: float = 30.0) -> None:
        """Deregister, refuse new requests, drain, and abort the remaining requests."""
        await self.unregister()
        if not await self.drain(drain_timeout_s):
            logger.warning("aborting %d requests of %s: drain timeout", self.inflight, self.instance.endpoint)
            self.cut()
        self._runtime.dispatcher.remove(self._served.path)
        self._runtime.forget(self)


class Endpoint:
    """Endpoint `namespace.component.endpoint` as seen by one process."""

    def __init__(self, runtime: "DistributedRuntime", id: EndpointId) -> None:
        self._runtime = runtime
        self.id = id
        self._metrics = EndpointExposition(runtime)
        self._serving: Serving | None = None

    def __str__(self) -> str:
        return str(self.id)

    def connection_id(self) -> int:
        """Return the instance id of this process."""
        return self._runtime.instance_id

    @property
    def metrics(self) -> "EndpointExposition":
        """Return the registration of engine metrics."""
        return self._metrics

    @property
    def runtime(self) -> "DistributedRuntime":
        """Return the runtime that created the endpoint."""
        return self._runtime

    @property
    def discovery(self) -> "Discovery":
        """Return the registry that contains the endpoint's records."""
        return self._runtime.discovery

    async def first_token_source(self, worker_type: Any) -> FirstTokenSource | None:
        """Return the reports of this worker's first tokens; None for a worker that produces none (prefill, encode)."""
        if str(worker_type) in {"prefill", "encode"}:
            return None
        publisher = await self._runtime.event_plane.publisher(self.id, ACTIVE_SEQUENCES_TOPIC)
        return FirstTokenSource(publisher, self._runtime.instance_id)

    async def client(self, router_mode: RouterMode | str | None = None) -> Client:
        """Return a started client of this endpoint, which can be used on every event loop."""
        return await self._runtime.thread.run(self._client(router_mode))

    async def _client(self, router_mode: RouterMode | str | None) -> Client:
        runtime = self._runtime
        client = Client(self.id, runtime.discovery, runtime.request_plane, router_mode, runtime.metrics)
        await client.start()
        runtime.own(client)
        return client

    async def serve(
        self, handler: Handler, options: ServeOptions | None = None, *, device: str | None = None
    ) -> Serving:
        """Serve this endpoint until it is closed or the runtime shuts down; it is registered on return.

        `device` is the kind of device that computes the responses, `cpu` or `cuda`; None: by the environment.
        """
        runtime = self._runtime
        if is_foreign(runtime.event_loop()):
            raise RuntimeError(f"endpoint {self}: its runtime belongs to another event loop, where handlers cannot run")
        await runtime.request_plane.listen()
        path = self._path
        more = options.metrics_labels if options is not None else ()
        metrics = EndpointMetrics(runtime.metrics, self.id, runtime.instance_id, more)
        served = runtime.dispatcher.add(path, handler, options, metrics)
        await runtime.request_plane.open(path)
        instance = self._instance(device)
        serving = self._serving = Serving(runtime, instance, served)
        runtime.serving(serving)
        await serving.register()
        runtime.check_health(self.id.name, served)
        return serving

    @property
    def _path(self) -> str:
        return f"{self._runtime.instance_id:x}/{self.id.handler_path}"

    def _instance(self, device: str | None = None) -> Instance:
        runtime = self._runtime
        return Instance(
            component=self.id.component,
            endpoint=self.id.name,
            namespace=self.id.namespace,
            instance_id=runtime.instance_id,
            transport=runtime.request_plane.address(self._path),
            device_type=device or device_type(),
            request_plane_codec=request_plane_codec(),
            response_frames=RESPONSE_FRAMES if runtime.request_plane.speaks_batched else 0,
        )

    async def serve_endpoint(
        self,
        generator: GeneratorFunction,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
        health_check_payload: dict[str, Any] | None = None,
    ) -> None:
        """Serve an async generator of values; return after the runtime has shut down.

        Raise `InvalidArgument` for an unsuitable handler. Open the system server if it is enabled.
        """
        options = ServeOptions(
            graceful_shutdown=graceful_shutdown,
            health_check_payload=health_check_payload,
            metrics_labels=_labels(metrics_labels),
        )
        await self._serve_until_closed(GeneratorHandler(generator, self._runtime.tasks), options)

    async def serve_bidirectional_endpoint(
        self,
        generator: GeneratorFunction,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
    ) -> None:
        """Serve a handler that reads its request as a stream of frames: `handler(request_stream[, context])`.

        A request without a stream is one frame.
        """
        options = ServeOptions(graceful_shutdown=graceful_shutdown, metrics_labels=_labels(metrics_labels))
        await self._serve_until_closed(BidirectionalHandler(generator, self._runtime.tasks), options)

    async def _serve_until_closed(self, handler: Handler, options: ServeOptions) -> None:
        await self._runtime.connect()
        await self._runtime.start_system_server()
        await self.serve(handler, options)
        await self._runtime.wait_closed()

    async def unregister_endpoint_instance(self) -> None:
        """Deregister this process's instance of the endpoint."""
        if self._serving is not None:
            await self._serving.unregister()
        else:
            await self.discovery.delete(INSTANCES, self.record_key)

    async def register_endpoint_instance(self) -> None:
        """Register this process's instance of the endpoint, also if it is not served: callers then find the id."""
        if self._serving is not None:
            await self._serving.register()
            return
        await self._runtime.request_plane.listen()
        instance = self._instance()
        await self.discovery.put(INSTANCES, instance.key, json_encode(instance))

    @property
    def record_key(self) -> str:
        """Return the key of this process's records of the endpoint: its instance and its model card."""
        return record_key(self.id, self._runtime.instance_id)


def _labels(pairs: list[tuple[str, str]] | None) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in pairs or ())


class EndpointExposition:
    """Engine metrics that are appended to the `/metrics` of this process."""

    def __init__(self, runtime: "DistributedRuntime") -> None:
        self._runtime = runtime

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append the exposition text that `callback` returns."""
        self._runtime.metrics.add_text(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], list[TypedFamily]]) -> None:
        """Accept typed families; as in Dynamo they are not part of `/metrics`, and without OTLP export they are unused."""
        if not callable(callback):
            raise TypeError("register_prometheus_typed_callback: callback must be callable")


if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime


class Namespace:
    """First part of an endpoint's name."""

    def __init__(self, runtime: "DistributedRuntime", name: str) -> None:
        self._runtime = runtime
        self.name = one_part(name)

    def component(self, name: str) -> "Component":
        """Return a component of this namespace."""
        return Component(self._runtime, self.name, name)

    def __str__(self) -> str:
        return self.name


class Component:
    """First two parts of an endpoint's name."""

    def __init__(self, runtime: "DistributedRuntime", namespace: str, name: str) -> None:
        self._runtime = runtime
        self.namespace = namespace
        self.name = one_part(name)

    def endpoint(self, name: str) -> Endpoint:
        """Return an endpoint of this component."""
        return self._runtime.endpoint(f"{self.namespace}.{self.name}.{one_part(name)}")

    async def create_service(self) -> None:
        """Open the listener of this process's endpoints; serving an endpoint opens it as well."""
        await self._runtime.request_plane.listen()

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def one_part(name: str) -> str:
    """Return `name`. Raise `InvalidArgument` if it has several parts."""
    if not name or "." in name:
        raise InvalidArgument(f"name {name!r}: must be one part without dots")
    return name
