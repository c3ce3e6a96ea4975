"""Registration gateway: the gRPC service `PluginRegistry`, at which plugins register themselves."""

from collections.abc import Callable
from typing import Any

import grpc

from dynamo.core.errors import ConfigError
from dynamo.planner.config.plugins import GatewayConfig
from dynamo.planner.plugin_transport.messages import CLASSES, REGISTRY_SERVICE, from_wire, to_wire
from dynamo.planner.plugin_transport.registry import AUTH_FAILED, PluginRegistry
from dynamo.planner.plugins.types import (
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    UnregisterRequest,
    UnregisterResponse,
)

CALLS_MAX = 64
"""Concurrent calls; each takes microseconds."""
STOP_S = 1.0


class PluginGateway:
    """gRPC server of one registry."""

    def __init__(self, config: GatewayConfig, registry: PluginRegistry, clock: Callable[[], float]) -> None:
        """Raise `ConfigError` for an address that would send tokens unencrypted without permission."""
        if not config.listen.startswith("unix:") and not config.allow_insecure:
            raise ConfigError(
                f"scheduling.gateway.listen: {config.listen}: is not encrypted; must be unix:/PATH, or set allow_insecure"
            )
        self._listen = config.listen
        self._registry = registry
        self._clock = clock
        self._server: Any = None
        self.address = config.listen
        """Address in use, with the port that was assigned."""

    async def start(self) -> None:
        """Open the address and serve. Raise `ConfigError` if it cannot be opened."""
        server = grpc.aio.server(maximum_concurrent_rpcs=CALLS_MAX)
        methods = {
            "Register": (self._register, "RegisterRequest"),
            "Heartbeat": (self._heartbeat, "HeartbeatRequest"),
            "Unregister": (self._unregister, "UnregisterRequest"),
            "ListPlugins": (self._list_plugins, "ListPluginsRequest"),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=CLASSES[request].FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, (method, request) in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REGISTRY_SERVICE, handlers),))
        try:
            port = server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise ConfigError(f"scheduling.gateway.listen: {self._listen}: cannot be opened: {error}") from None
        if self._listen.endswith(":0"):
            self.address = f"{self._listen.removesuffix(':0')}:{port}"
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Close the address."""
        if self._server is not None:
            await self._server.stop(STOP_S)

    async def _register(self, wire: Any, context: Any) -> Any:
        try:
            request = from_wire(wire, RegisterRequest)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"register: {error}")
        return to_wire(self._registry.register(request))

    async def _heartbeat(self, wire: Any, context: Any) -> Any:
        request = from_wire(wire, HeartbeatRequest)
        await _check(context, self._registry.heartbeat(request.plugin_id, request.auth_token, self._clock()))
        return to_wire(HeartbeatResponse(ok=True))

    async def _unregister(self, wire: Any, context: Any) -> Any:
        request = from_wire(wire, UnregisterRequest)
        await _check(context, self._registry.unregister(request.plugin_id, request.auth_token))
        return to_wire(UnregisterResponse(ok=True))

    async def _list_plugins(self, wire: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "list_plugins: not available over gRPC")


async def _check(context: Any, refused: str) -> None:
    if refused:
        is_unknown = refused == AUTH_FAILED
        status = grpc.StatusCode.UNAUTHENTICATED if is_unknown else grpc.StatusCode.PERMISSION_DENIED
        await context.abort(status, refused)
