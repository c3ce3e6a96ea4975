"""DistributedRuntime: registry, planes, endpoints and shutdown of one process."""

import asyncio
import contextlib
import functools
import logging
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar, runtime_checkable

from dynamo.core.api_keys import ADMIN_API_KEYS, keys_of_variable
from dynamo.core.clock import SystemClock
from dynamo.core.config import environ, load, setting
from dynamo.core.errors import ConfigError
from dynamo.core.loops import LoopThread, running_loop
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.canary import CanaryOptions, watch
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.config import (
    DEFAULT_EVENT_PLANE,
    MEMORY_EVENT_PLANES,
    RuntimeOptions,
    check_event_plane,
    check_response_plane,
    nats_options,
    request_plane_codec,
    tcp_options,
)
from dynamo.runtime.discovery.base import (
    AssigningDiscovery,
    DescribedDiscovery,
    Discovery,
    RemoteDiscovery,
    SupervisedDiscovery,
    new_id,
)
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.request_plane.base import RequestPlane
from dynamo.runtime.request_plane.tcp.common import advertised
from dynamo.runtime.server import Dispatcher, EngineRoute, Served

if TYPE_CHECKING:
    from dynamo.runtime.client import Client
    from dynamo.runtime.component import Namespace
    from dynamo.runtime.event_plane.base import EventPlane
    from dynamo.runtime.system import SystemServer
    from dynamo.runtime.transports.nats.connection import NatsConnection

logger = logging.getLogger(__name__)

T = TypeVar("T")

DRAIN_TIMEOUT_S = 30.0  # Duration of a long response of a slow engine; the default of `shutdown`.


@runtime_checkable
class ServerPlane(Protocol):
    """Plane that requires a server connection."""

    async def start(self) -> None:
        """Wait for the connection. Raise `ConfigError` when the server is unreachable or rejects the credentials."""


class DistributedRuntime:
    """Runtime of one process, ended by `shutdown`. It runs on the running loop, or on `event_loop` if none runs yet."""

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop | None = None,
        discovery_backend: "str | Discovery" = "file",
        request_plane: "str | Callable[[Dispatcher, MetricsRegistry], RequestPlane]" = "tcp",
        enable_nats: bool | None = None,
        *,
        event_plane: "str | Callable[[Discovery], EventPlane] | None" = None,
        response_plane: str | None = None,
        metrics: MetricsRegistry | None = None,
        options: RuntimeOptions | None = None,
    ) -> None:
        self._loop = _loop_of(event_loop)
        self.thread = LoopThread(self._loop)
        """Runs the loop while objects of this runtime are used outside of it."""
        check_response_plane(response_plane if options is None else options.response_plane)
        if isinstance(event_plane, str):
            check_event_plane(event_plane)
        if enable_nats is not None:
            warnings.warn("enable_nats has no effect; set request_plane", DeprecationWarning, stacklevel=2)
        self.instance_id = new_id()
        self.metrics = MetricsRegistry() if metrics is None else metrics
        self.health = SystemHealth()
        self._canary_options = CanaryOptions.from_variables()
        self.dispatcher = Dispatcher()
        self.tasks = TaskOwner("runtime")
        self._options = options
        self.discovery = _on_loop(self._loop, lambda: make_discovery(discovery_backend, self.instance_id))
        if isinstance(self.discovery, AssigningDiscovery):
            self.instance_id = self.discovery.instance_id
        self.request_plane = _on_loop(
            self._loop, lambda: make_request_plane(request_plane, self.dispatcher, self.metrics, options)
        )
        self._event_plane_choice = event_plane or DEFAULT_EVENT_PLANE
        self._event_plane: EventPlane | None = None
        self.engine_routes: dict[str, EngineRoute] = {}
        self._files: dict[str, str] = {}
        self._system: SystemServer | None = None
        self._servings: list[Serving] = []
        self._clients: list[Client] = []
        self.health.checks.append(lambda: all(client.is_sound or client.is_closed for client in self._clients))
        self._closed = asyncio.Event()
        self._shutdown: asyncio.Task[None] | None = None
        uptime = self.metrics.gauge("dynamo_component_uptime_seconds", "Seconds since the process started")
        uptime.labels().follow(self.health.uptime_s)
        self.health.checks.append(lambda: self._event_plane is None or self._event_plane.is_sound)
        if isinstance(self.discovery, SupervisedDiscovery):
            supervised = self.discovery
            self.health.checks.append(lambda: supervised.is_sound)
        if isinstance(self.discovery, RemoteDiscovery):
            self._observe(self.discovery)

    @classmethod
    def from_options(cls, options: RuntimeOptions, metrics: MetricsRegistry | None = None) -> "DistributedRuntime":
        """Return a runtime with these options; several runtimes of a process may share `metrics`."""
        planes = options.discovery_backend, options.request_plane
        return cls(None, *planes, event_plane=options.event_plane, metrics=metrics, options=options)

    @staticmethod
    def detached() -> "DistributedRuntime":
        """Return a runtime with the planes of the environment (`DYN_DISCOVERY_BACKEND`, `DYN_REQUEST_PLANE`, …)."""
        return DistributedRuntime.from_options(load(RuntimeOptions, []))

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of this runtime."""
        return self._loop

    def to_capsule(self) -> NoReturn:
        """Raise `RuntimeError`: upstream's capsule is a pointer to its compiled runtime, which is absent here."""
        raise RuntimeError("DistributedRuntime.to_capsule: there is no compiled runtime that a capsule can point to")

    async def connect(self) -> None:
        """Wait until each configured server has answered once. Raise `ConfigError`."""
        if isinstance(self.discovery, RemoteDiscovery):
            await self.discovery.connect()
        if isinstance(self.request_plane, ServerPlane):
            await self.request_plane.start()
        if self._event_plane_choice == "nats" and isinstance(self.event_plane, ServerPlane):
            await self.event_plane.start()

    def _observe(self, discovery: RemoteDiscovery) -> None:
        """Export the reachability of the registry; only a crashed watcher makes this process not ready."""
        reachable = self.metrics.gauge(
            "dynamo_component_discovery_reachable", "1 while the registry answers; 0 while its last view is used"
        )
        reachable.labels().follow(lambda: float(discovery.is_reachable))

    def endpoint(self, path: str) -> Endpoint:
        """Return the endpoint `ns.comp.ep` or `dyn://ns.comp.ep`. Raise `InvalidArgument` for another form."""
        return Endpoint(self, EndpointId.parse(path))

    def namespace(self, name: str) -> "Namespace":
        """Return a namespace, for `namespace(n).component(c).endpoint(e)`."""
        from dynamo.runtime.component import Namespace

        return Namespace(self, name)

    @property
    def event_plane(self) -> "EventPlane":
        """Return the event plane, created on first access: a process without events opens no sockets for them."""
        if self._event_plane is None:
            self._event_plane = make_event_plane(self._event_plane_choice, self.discovery, self._options, self.metrics)
        return self._event_plane

    def nats_connection(self, purpose: str) -> "NatsConnection":
        """Return a NATS connection (NATS_SERVER) for uses other than the planes. Raise `ConfigError`."""
        from dynamo.runtime.transports.nats.connection import NatsConnection

        return NatsConnection(nats_options(self._options), purpose, registry=self.metrics)

    def set_health_status(self, ready: bool) -> None:
        """Set the health status of this process, overriding that of its endpoints."""
        self.health.set(ready)

    def register_engine_route(self, route_name: str, callback: EngineRoute) -> None:
        """Serve `/engine/<route_name>` of the system server with the result of `callback`."""
        self.engine_routes[route_name] = callback

    async def start_system_server(self) -> int | None:
        """Open the system server if `DYN_SYSTEM_PORT` is 0 or more; return its port, None without a server."""
        port = setting("DYN_SYSTEM_PORT", -1, int)
        if port < 0:
            return None
        if self._system is None:
            from dynamo.runtime.system import SystemServer

            host = setting("DYN_SYSTEM_HOST", "0.0.0.0", str)  # noqa: S104 - Dynamo's default: scraped from other hosts
            keys = keys_of_variable(ADMIN_API_KEYS, environ())
            records = self.discovery.data if isinstance(self.discovery, DescribedDiscovery) else None
            self._system = SystemServer(
                self.health, self.metrics, self.engine_routes, self._files, keys, records=records
            )
            await self._system.listen(host, port)
        return self._system.port

    def check_health(self, endpoint: str, served: Served) -> None:
        """Start health checks of the endpoint if they are enabled and a payload is configured."""
        options, payload = self._canary_options, served.options.health_check_payload
        if options is None or payload is None:
            return
        report = functools.partial(self.health.report, endpoint)
        codec, clock = request_plane_codec(), SystemClock()
        self.tasks.supervise(lambda: watch(served, payload, codec, options, clock, report), f"canary of {endpoint}")

    def show_file(self, path: str, file: str) -> str | None:
        """Serve a file at that path of the system server; return its URL, None without a system server."""
        url = self.system_status_server_url()
        if url is None:
            return None
        self._files[path] = file
        return url + path

    def system_status_server_url(self) -> str | None:
        """Return the URL of the system server as other hosts reach it, None without a system server."""
        if self._system is None:
            return None
        host = advertised(setting("DYN_SYSTEM_HOST", "", str))
        return f"http://{f'[{host}]' if ':' in host else host}:{self._system.port}"

    # Shutdown ------------------------------------------------------------------------------------------------------

    def shutdown(self, drain_timeout_s: float = DRAIN_TIMEOUT_S, grace_s: float = 0.0) -> "asyncio.Task[None]":
        """Start the shutdown: deregister, accept late requests for `grace_s`, refuse, drain, close; return its task."""
        if self._shutdown is None:
            loop, end = self._loop, self._end(drain_timeout_s, grace_s)
            other = running_loop()
            if other is not None and other is not loop:
                self._shutdown = other.create_task(self.thread.run(end), name="runtime.shutdown")
                return self._shutdown
            if other is None:
                self.thread.stop()
            self._shutdown = loop.create_task(end, name="runtime.shutdown")
            if not loop.is_running() and not loop.is_closed():  # Called after the program's `run_until_complete`.
                loop.run_until_complete(self._shutdown)
        return self._shutdown

    async def shutdown_and_wait(self) -> None:
        """Shut down and wait for the end."""
        await self.shutdown()

    async def wait_closed(self) -> None:
        """Wait until the runtime has shut down."""
        await self._closed.wait()

    async def _end(self, drain_timeout_s: float, grace_s: float) -> None:
        async with contextlib.AsyncExitStack() as closing:  # Last in, first out; one failure does not skip the others.
            closing.push_async_callback(self.tasks.cancel_and_wait)
            closing.callback(self._closed.set)
            if self._system is not None:
                closing.push_async_callback(self._system.close)
            closing.push_async_callback(self.request_plane.close)
            closing.push_async_callback(self.discovery.close)
            if self._event_plane is not None:
                closing.push_async_callback(self._event_plane.close)
            for client in self._clients:
                closing.push_async_callback(client.close)
            await self._drain(drain_timeout_s, grace_s)

    async def _drain(self, drain_timeout_s: float, grace_s: float) -> None:
        for serving in self._servings:
            await serving.unregister()
        if grace_s > 0 and self._servings:
            await asyncio.sleep(grace_s)
        await asyncio.gather(*(serving.close(drain_timeout_s) for serving in list(self._servings)))

    # Owned objects -------------------------------------------------------------------------------------------------

    def serving(self, serving: Serving) -> None:
        """Close `serving` at shutdown."""
        self._servings.append(serving)

    @property
    def is_serving(self) -> bool:
        """Return whether this runtime serves an endpoint."""
        return bool(self._servings)

    def forget(self, serving: Serving) -> None:
        """Stop tracking `serving`: it is closed."""
        if serving in self._servings:
            self._servings.remove(serving)

    def own(self, client: "Client") -> None:
        """Close `client` at shutdown, unless it is closed before."""
        self._clients = [other for other in self._clients if not other.is_closed]
        self._clients.append(client)


def _loop_of(given: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """Return the running loop, else the given one. Raise `RuntimeError` without either."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if given is None:
            raise
        return given


def _on_loop(loop: asyncio.AbstractEventLoop, build: Callable[[], T]) -> T:
    """Return `build()`, called on `loop`, which is run for it unless it is already running."""
    if loop.is_running():
        return build()

    async def call() -> T:
        return build()

    return loop.run_until_complete(call())


def make_discovery(choice: "str | Discovery", instance_id: int) -> Discovery:
    """Return the registry of that name for this instance id. Raise `ConfigError` for an unknown name."""
    if not isinstance(choice, str):
        return choice
    if choice == "file":
        from dynamo.runtime.discovery.file import FileDiscovery

        return FileDiscovery()
    if choice == "etcd":
        from dynamo.runtime.discovery.etcd import EtcdDiscovery

        return EtcdDiscovery(instance_id)
    if choice in {"mem", "memory"}:
        from dynamo.runtime.discovery.memory import MemoryDiscovery

        return MemoryDiscovery()
    if choice == "kubernetes":
        from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery

        return KubernetesDiscovery()
    raise ConfigError(f"--discovery-backend {choice}: must be file, etcd, kubernetes or mem")


def make_request_plane(
    choice: "str | Callable[[Dispatcher, MetricsRegistry], RequestPlane]",
    dispatcher: Dispatcher,
    registry: MetricsRegistry,
    options: RuntimeOptions | None = None,
) -> RequestPlane:
    """Return the request plane of that name. Raise `ConfigError` for an unknown name."""
    if not isinstance(choice, str):
        return choice(dispatcher, registry)
    if choice == "tcp":
        from dynamo.runtime.request_plane.tcp.plane import TcpPlane

        return TcpPlane(dispatcher, tcp_options(options=options), registry)
    if choice in {"mem", "memory"}:
        from dynamo.runtime.request_plane.memory import MemoryPlane

        return MemoryPlane(dispatcher)
    if choice == "nats":
        from dynamo.runtime.request_plane.nats import NatsPlane

        return NatsPlane(dispatcher, nats_options(options), tcp_options(options=options), registry)
    raise ConfigError(f"--request-plane {choice}: must be tcp or nats")


def make_event_plane(
    choice: "str | Callable[[Discovery], EventPlane]",
    discovery: Discovery,
    options: RuntimeOptions | None = None,
    registry: MetricsRegistry | None = None,
) -> "EventPlane":
    """Return the event plane of that name, which `check_event_plane` accepts. Raise `ConfigError` for an invalid NATS server."""
    if not isinstance(choice, str):
        return choice(discovery)
    if choice == "zmq":
        from dynamo.runtime.event_plane.zmq import ZmqEventPlane

        return ZmqEventPlane(discovery)
    if choice in MEMORY_EVENT_PLANES:
        from dynamo.runtime.event_plane.memory import MemoryEventPlane

        return MemoryEventPlane()
    from dynamo.runtime.event_plane.nats import NatsEventPlane

    return NatsEventPlane(discovery, nats_options(options), registry=registry)
