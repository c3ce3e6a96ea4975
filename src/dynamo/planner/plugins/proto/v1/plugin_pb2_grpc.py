"""Clients and servers of the services of `dynamo.planner.plugin.v1`.

A stub has a callable for each method of its service. A servicer is subclassed; its methods, plain or `async` by the kind of
server, take the request and the context.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc

from dynamo.planner.plugin_transport.messages import CLASSES, PACKAGE

METHODS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "PluginRegistry": {
        "Register": ("RegisterRequest", "RegisterResponse"),
        "Heartbeat": ("HeartbeatRequest", "HeartbeatResponse"),
        "Unregister": ("UnregisterRequest", "UnregisterResponse"),
        "ListPlugins": ("ListPluginsRequest", "ListPluginsResponse"),
    },
    "PredictPlugin": {
        "Predict": ("PredictStageRequest", "PredictStageResponse"),
    },
    "ProposePlugin": {
        "Propose": ("ProposeStageRequest", "ProposeStageResponse"),
    },
    "ReconcilePlugin": {
        "Reconcile": ("ReconcileStageRequest", "ReconcileStageResponse"),
    },
    "ConstrainPlugin": {
        "Constrain": ("ConstrainStageRequest", "ConstrainStageResponse"),
    },
    "PluginLifecycle": {
        "Bootstrap": ("BootstrapRequest", "BootstrapResponse"),
        "Reset": ("ResetRequest", "ResetResponse"),
    },
}
"""Request and response of each method, by service."""


def _connect(stub: object, service: str, channel: Any) -> None:
    """Add the service's methods to a stub."""
    for method, (request, response) in METHODS[service].items():
        call = channel.unary_unary(
            f"/{PACKAGE}.{service}/{method}",
            request_serializer=CLASSES[request].SerializeToString,
            response_deserializer=CLASSES[response].FromString,
        )
        setattr(stub, method, call)


def _serve(servicer: object, service: str, server: Any) -> None:
    """Add a servicer's methods to a server."""
    handlers = {
        method: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, method),
            request_deserializer=CLASSES[request].FromString,
            response_serializer=CLASSES[response].SerializeToString,
        )
        for method, (request, response) in METHODS[service].items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers),))


class UnimplementedMethodError(NotImplementedError):
    """A method that a servicer does not override."""


def _unimplemented(context: Any) -> NoReturn:
    """Fail a call of a method that a servicer does not override."""
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    context.set_details("Method not implemented!")
    raise UnimplementedMethodError("Method not implemented!")


class PluginRegistryStub:
    """Client of `PluginRegistry`."""

    Register: Any
    Heartbeat: Any
    Unregister: Any
    ListPlugins: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "PluginRegistry", channel)


class PluginRegistryServicer:
    """Base of servers of `PluginRegistry`."""

    def Register(self, request: Any, context: Any) -> Any:
        """Serve `Register`."""
        _unimplemented(context)

    def Heartbeat(self, request: Any, context: Any) -> Any:
        """Serve `Heartbeat`."""
        _unimplemented(context)

    def Unregister(self, request: Any, context: Any) -> Any:
        """Serve `Unregister`."""
        _unimplemented(context)

    def ListPlugins(self, request: Any, context: Any) -> Any:
        """Serve `ListPlugins`."""
        _unimplemented(context)


def add_PluginRegistryServicer_to_server(servicer: PluginRegistryServicer, server: Any) -> None:
    """Serve `PluginRegistry` with a gRPC server."""
    _serve(servicer, "PluginRegistry", server)


class PredictPluginStub:
    """Client of `PredictPlugin`."""

    Predict: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "PredictPlugin", channel)


class PredictPluginServicer:
    """Base of servers of `PredictPlugin`."""

    def Predict(self, request: Any, context: Any) -> Any:
        """Serve `Predict`."""
        _unimplemented(context)


def add_PredictPluginServicer_to_server(servicer: PredictPluginServicer, server: Any) -> None:
    """Serve `PredictPlugin` with a gRPC server."""
    _serve(servicer, "PredictPlugin", server)


class ProposePluginStub:
    """Client of `ProposePlugin`."""

    Propose: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "ProposePlugin", channel)


class ProposePluginServicer:
    """Base of servers of `ProposePlugin`."""

    def Propose(self, request: Any, context: Any) -> Any:
        """Serve `Propose`."""
        _unimplemented(context)


def add_ProposePluginServicer_to_server(servicer: ProposePluginServicer, server: Any) -> None:
    """Serve `ProposePlugin` with a gRPC server."""
    _serve(servicer, "ProposePlugin", server)


class ReconcilePluginStub:
    """Client of `ReconcilePlugin`."""

    Reconcile: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "ReconcilePlugin", channel)


class ReconcilePluginServicer:
    """Base of servers of `ReconcilePlugin`."""

    def Reconcile(self, request: Any, context: Any) -> Any:
        """Serve `Reconcile`."""
        _unimplemented(context)


def add_ReconcilePluginServicer_to_server(servicer: ReconcilePluginServicer, server: Any) -> None:
    """Serve `ReconcilePlugin` with a gRPC server."""
    _serve(servicer, "ReconcilePlugin", server)


class ConstrainPluginStub:
    """Client of `ConstrainPlugin`."""

    Constrain: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "ConstrainPlugin", channel)


class ConstrainPluginServicer:
    """Base of servers of `ConstrainPlugin`."""

    def Constrain(self, request: Any, context: Any) -> Any:
        """Serve `Constrain`."""
        _unimplemented(context)


def add_ConstrainPluginServicer_to_server(servicer: ConstrainPluginServicer, server: Any) -> None:
    """Serve `ConstrainPlugin` with a gRPC server."""
    _serve(servicer, "ConstrainPlugin", server)


class PluginLifecycleStub:
    """Client of `PluginLifecycle`."""

    Bootstrap: Any
    Reset: Any

    def __init__(self, channel: Any) -> None:
        _connect(self, "PluginLifecycle", channel)


class PluginLifecycleServicer:
    """Base of servers of `PluginLifecycle`."""

    def Bootstrap(self, request: Any, context: Any) -> Any:
        """Serve `Bootstrap`."""
        _unimplemented(context)

    def Reset(self, request: Any, context: Any) -> Any:
        """Serve `Reset`."""
        _unimplemented(context)


def add_PluginLifecycleServicer_to_server(servicer: PluginLifecycleServicer, server: Any) -> None:
    """Serve `PluginLifecycle` with a gRPC server."""
    _serve(servicer, "PluginLifecycle", server)
