"""Callers: one call of a plugin, in this process or over gRPC, with a deadline."""

import asyncio
import importlib
import inspect
from typing import Any, Protocol

import grpc

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import ConfigError
from dynamo.planner.config.plugins import InProcessPluginSpec, TransportConfig
from dynamo.planner.plugin_transport.messages import CLASSES, RESPONSES, SERVICES, from_wire, to_wire
from dynamo.planner.plugin_transport.registry import BUILTIN_PREFIX
from dynamo.planner.plugins.types import WireMessage

SCHEME = "grpc://"
KEEPALIVE_TIMEOUT_MS = 10_000
CLOSE_S = 1.0
"""Time for calls in progress when a channel closes."""


class PluginCallError(Exception):
    """A plugin did not answer a call; the message is the reason."""


class PluginCaller(Protocol):
    """A plugin that can be called."""

    async def call(self, method: str, request: WireMessage, timeout_s: float) -> WireMessage:
        """Return the response. Raise `PluginCallError` for a failure, and for none within the time."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...


class GrpcPlugin:
    """A plugin at a `grpc://host:port` endpoint; the connection is made at the first call and again after a failure."""

    def __init__(self, plugin_id: str, endpoint: str, transport: TransportConfig) -> None:
        """Raise `ValueError` for an endpoint that cannot be used."""
        if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
            raise ValueError(f"endpoint {endpoint!r}: must be {SCHEME}host:port")
        if not transport.allow_insecure_grpc:
            raise ValueError(
                f"endpoint {endpoint!r}: is not encrypted; requires plugin_registration.transport.allow_insecure_grpc=true"
            )
        self._plugin_id = plugin_id
        size = transport.max_message_size_bytes
        self._channel = grpc.aio.insecure_channel(
            endpoint.removeprefix(SCHEME),
            options=[
                ("grpc.keepalive_time_ms", transport.keepalive_time_ms),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.max_send_message_length", size),
                ("grpc.max_receive_message_length", size),
            ],
        )
        self._methods: dict[str, Any] = {}

    async def call(self, method: str, request: WireMessage, timeout_s: float) -> WireMessage:
        """Return the response. Raise `PluginCallError` for a failure, and for none within the time."""
        if method not in self._methods:
            self._methods[method] = self._channel.unary_unary(
                f"/{SERVICES[method]}/{method}",
                request_serializer=CLASSES[type(request).__name__].SerializeToString,
                response_deserializer=CLASSES[RESPONSES[method].__name__].FromString,
            )
        try:
            wire = await self._methods[method](to_wire(request), timeout=timeout_s)
            return from_wire(wire, RESPONSES[method])
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PluginCallError(f"timeout: no response within {timeout_s:.3g} s") from None
            raise PluginCallError(f"{code.name.lower()}: {error.details()}") from None
        except (ValueError, TypeError) as error:
            raise PluginCallError(f"invalid message: {error}") from None

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(CLOSE_S)


class InProcessPlugin:
    """An object with the methods of its stage, `async` or not; the latter run in a thread."""

    def __init__(self, instance: object) -> None:
        self._instance = instance

    async def call(self, method: str, request: WireMessage, timeout_s: float) -> WireMessage:
        """Return the response. Raise `PluginCallError` for a failure, and for none within the time."""
        function = getattr(self._instance, method, None)
        if not callable(function):
            raise PluginCallError(f"unimplemented: {type(self._instance).__name__} has no method {method}")
        failures: list[Exception] = []
        response: object = None
        with ErrorBoundary(failures.append):  # A plugin must not end the tick.
            async with asyncio.timeout(timeout_s):
                if inspect.iscoroutinefunction(function):
                    response = await function(request)
                else:
                    response = await asyncio.to_thread(function, request)
        if failures and isinstance(failures[0], TimeoutError):
            raise PluginCallError(f"timeout: no response within {timeout_s:.3g} s")
        if failures:
            raise PluginCallError(f"{type(failures[0]).__name__}: {failures[0]}")
        if not isinstance(response, RESPONSES[method]):
            raise PluginCallError(f"invalid message: {type(response).__name__}: must be {RESPONSES[method].__name__}")
        return response

    async def close(self) -> None:
        """Do nothing: the object has no connection."""


def load_plugin(spec: InProcessPluginSpec) -> InProcessPlugin:
    """Return the plugin that a configuration names. Raise `ConfigError` in one line if that is not possible."""
    where = f"plugin_registration.in_process_plugins: {spec.plugin_id}"
    if not spec.plugin_id or spec.plugin_id.startswith(BUILTIN_PREFIX):
        raise ConfigError(f"{where}: plugin_id: must not be empty or begin with {BUILTIN_PREFIX}")
    try:
        module = importlib.import_module(spec.module)
    except ImportError as error:
        raise ConfigError(f"{where}: module {spec.module!r}: cannot be imported: {error}") from None
    made = getattr(module, spec.class_, None)
    if not isinstance(made, type):
        raise ConfigError(f"{where}: class {spec.class_!r}: must be a class of the module {spec.module}")
    failures: list[Exception] = []
    with ErrorBoundary(failures.append):  # Any error of the plugin's constructor is an error of the configuration.
        instance = made(**spec.kwargs)
        method = spec.plugin_type.value.capitalize()
        if not callable(getattr(instance, method, None)):
            raise TypeError(f"must have a method {method}")
        return InProcessPlugin(instance)
    raise ConfigError(f"{where}: class {spec.class_!r}: {type(failures[0]).__name__}: {failures[0]}")
