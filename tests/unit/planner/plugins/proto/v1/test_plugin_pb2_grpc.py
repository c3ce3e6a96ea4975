"""Clients and servers of the plugin protocol, without a connection."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dynamo.planner.plugins.proto.v1 import plugin_pb2 as pb
from dynamo.planner.plugins.proto.v1 import plugin_pb2_grpc as services


class LocalChannel:
    """A channel and its server in one object."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []
        self.context = SimpleNamespace(set_code=self._set_code, set_details=lambda _: None)
        self.code: grpc.StatusCode | None = None

    def _set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers += handlers

    def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Any:
        def call(request: Any) -> Any:
            found = [one.service(SimpleNamespace(method=path)) for one in self.handlers]
            handler = next(one for one in found if one is not None)
            response = handler.unary_unary(handler.request_deserializer(request_serializer(request)), self.context)
            return response_deserializer(handler.response_serializer(response))

        return call


class Constrainer(services.ConstrainPluginServicer):
    """Rejects with the request's reason."""

    def Constrain(self, request: Any, context: Any) -> Any:
        return pb.ConstrainStageResponse(reject=pb.RejectResult(reason=request.context.request_id))


def test_stub_calls_the_servicer_method() -> None:
    channel = LocalChannel()
    services.add_ConstrainPluginServicer_to_server(Constrainer(), channel)
    request = pb.ConstrainStageRequest(context=pb.PipelineContext(request_id="tick"))
    assert services.ConstrainPluginStub(channel).Constrain(request).reject.reason == "tick"


@pytest.mark.parametrize("service", services.METHODS)
def test_methods_that_are_not_overridden_are_unimplemented(service: str) -> None:
    channel = LocalChannel()
    add = getattr(services, f"add_{service}Servicer_to_server")
    add(getattr(services, f"{service}Servicer")(), channel)
    stub = getattr(services, f"{service}Stub")(channel)
    for method, (request, _) in services.METHODS[service].items():
        with pytest.raises(NotImplementedError):
            getattr(stub, method)(getattr(pb, request)())
        assert channel.code is grpc.StatusCode.UNIMPLEMENTED
