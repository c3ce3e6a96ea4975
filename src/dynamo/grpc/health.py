"""gRPC health checks (`grpc.health.v1`). Watches are not served: clients poll `Check`."""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from dynamo.grpc.message_tables import classes_of, file_of
from dynamo.http2.grpc_call import GrpcCall, GrpcCode, GrpcStatus
from dynamo.http2.grpc_server import GrpcMethod

PACKAGE = "grpc.health.v1"
HEALTH_SERVICE = f"{PACKAGE}.Health"
SERVING, NOT_SERVING = 1, 2
TABLE = {"HealthCheckRequest": "1 service string", "HealthCheckResponse": "1 status enum"}
CLASSES = classes_of(file_of("health.proto", PACKAGE, TABLE))


def health_methods(is_serving: Callable[[str], bool | None]) -> dict[str, GrpcMethod]:
    """Return the methods of the service; `is_serving` returns the state of a service by name, None if it is unknown."""

    async def check(call: GrpcCall) -> None:
        try:
            request = CLASSES["HealthCheckRequest"].FromString(await call.read() or b"")
        except DecodeError:
            raise GrpcStatus(GrpcCode.INVALID_ARGUMENT, "the message is no HealthCheckRequest") from None
        state = is_serving(request.service)
        if state is None:
            raise GrpcStatus(GrpcCode.NOT_FOUND, f"service {request.service!r}: unknown")
        await call.write(CLASSES["HealthCheckResponse"](status=SERVING if state else NOT_SERVING).SerializeToString())

    return {f"/{HEALTH_SERVICE}/Check": check}


def health_handler(is_serving: Callable[[str], bool | None]) -> Any:
    """Return the same for a server of grpcio."""
    import grpc

    async def check(request: Any, context: Any) -> Any:
        state = is_serving(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service!r}: unknown")
        return CLASSES["HealthCheckResponse"](status=SERVING if state else NOT_SERVING)

    method = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=CLASSES["HealthCheckRequest"].FromString,
        response_serializer=CLASSES["HealthCheckResponse"].SerializeToString,
    )
    return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": method})
