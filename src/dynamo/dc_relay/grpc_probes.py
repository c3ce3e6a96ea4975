"""gRPC health checks (`grpc.health.v1`) and reflection (`grpc.reflection.v1`) of the relay's service."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from dynamo.dc_relay.messages import FILE, SERVICE
from dynamo.grpc.health import health_handler
from dynamo.grpc.message_tables import classes_of, file_of

REFLECTION = "grpc.reflection.v1"
REFLECTION_SERVICE = f"{REFLECTION}.ServerReflection"

_REFLECTION_TABLE = {
    "ServerReflectionRequest": (
        "1 host string, 3 file_by_filename string|message_request, 4 file_containing_symbol string|message_request,"
        " 7 list_services string|message_request"
    ),
    "FileDescriptorResponse": "1 file_descriptor_proto bytes*",
    "ServiceResponse": "1 name string",
    "ListServiceResponse": "1 service ServiceResponse*",
    "ErrorResponse": "1 error_code int32, 2 error_message string",
    "ServerReflectionResponse": (
        "1 valid_host string, 2 original_request ServerReflectionRequest,"
        " 4 file_descriptor_response FileDescriptorResponse|message_response,"
        " 6 list_services_response ListServiceResponse|message_response, 7 error_response ErrorResponse|message_response"
    ),
}
_REFLECTION_CLASSES = classes_of(file_of("reflection.proto", REFLECTION, _REFLECTION_TABLE))


def probe_handlers(is_serving: Callable[[], bool]) -> tuple[Any, ...]:
    """Return the handlers of both services."""

    async def reflect(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield reflected(request)

    reflection = grpc.stream_stream_rpc_method_handler(
        reflect,
        request_deserializer=_REFLECTION_CLASSES["ServerReflectionRequest"].FromString,
        response_serializer=_REFLECTION_CLASSES["ServerReflectionResponse"].SerializeToString,
    )
    return (
        health_handler(lambda service: is_serving() if service in ("", SERVICE) else None),
        grpc.method_handlers_generic_handler(REFLECTION_SERVICE, {"ServerReflectionInfo": reflection}),
    )


def reflected(request: Any) -> Any:
    """Return the answer to a reflection request: the services, or the file that defines the relay's."""
    response = _REFLECTION_CLASSES["ServerReflectionResponse"](valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        for name in (REFLECTION_SERVICE, SERVICE):
            response.list_services_response.service.add(name=name)
    elif (kind == "file_containing_symbol" and request.file_containing_symbol.startswith(FILE.package)) or (
        kind == "file_by_filename" and request.file_by_filename == FILE.name
    ):
        response.file_descriptor_response.file_descriptor_proto.append(FILE.SerializeToString())
    else:
        response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
        response.error_response.error_message = f"{kind}: unknown"
    return response
