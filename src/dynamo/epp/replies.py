"""Replies: the ext_proc responses that set a request's destination, pass bodies on, or answer in place of a worker. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo.epp.messages import CLASSES, OVERWRITE_IF_EXISTS_OR_ADD
from dynamo.serving.errors import ErrorAnswer

CHUNK_BYTES = 62_000
"""Maximum part of a body in one message: gateways buffer 64 KiB."""
DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_METADATA = "envoy.lb"
"""Namespace of the gateway's metadata that carries the destination, besides the header."""
ROUTING_HEADERS = (
    "x-dynamo-worker-instance-id",
    "x-dynamo-dp-rank",
    "x-dynamo-prefill-instance-id",
    "x-dynamo-prefill-dp-rank",
    "x-dynamo-routing-mode",
)
"""Headers that the picker sets; those of the client are replaced or removed."""
REMOVED_HEADERS = (
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dp-rank",
    "x-data-parallel-rank",
    "x-prefill-dp-rank",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-gateway-model-name-rewrite",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-prefiller-host-port",
)
"""Headers of clients that would override the choice: former names, and those that only the gateway may set."""
TOO_MANY_REQUESTS = 429
ENVOY_STATUS_RANGES = (
    (200, 208), (226, 226), (300, 305), (307, 308), (400, 417), (421, 424), (426, 426), (428, 429), (431, 431),
    (500, 508), (510, 511),
)  # fmt: skip
"""First and last values of Envoy's `StatusCode`; a gateway rejects a response with any other one."""


def destination_mutation(destination: str, headers: Mapping[str, str]) -> Any:
    """Return the header changes that send a request to a worker: address and routing headers."""
    mutation = CLASSES["HeaderMutation"]()
    add = mutation.set_headers.add
    for key, value in ((DESTINATION, destination), *headers.items()):
        option = add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key = key
        option.header.raw_value = value.encode()
    mutation.remove_headers.extend(name for name in ROUTING_HEADERS if name not in headers)
    mutation.remove_headers.extend(REMOVED_HEADERS)
    return mutation


def with_destination(phase: str, destination: str, headers: Mapping[str, str]) -> Any:
    """Return the response of phase `request_headers` or `request_body` that sends a request to a worker."""
    response = CLASSES["ProcessingResponse"]()
    common = getattr(response, phase).response
    common.header_mutation.CopyFrom(destination_mutation(destination, headers))
    common.clear_route_cache = True
    lb = response.dynamic_metadata.fields[DESTINATION_METADATA].struct_value
    lb.fields[DESTINATION].string_value = destination
    return response


def unchanged(phase: str) -> Any:
    """Return the response that passes a message on as it is."""
    response = CLASSES["ProcessingResponse"]()
    getattr(response, phase).SetInParent()
    if not phase.endswith("_trailers"):
        getattr(response, phase).response.SetInParent()
    return response


def chunks(phase: str, body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield the responses that pass a streamed body on; `ends`: no other part follows."""
    for start in range(0, len(body) or 1, CHUNK_BYTES):
        part = body[start : start + CHUNK_BYTES]
        response = CLASSES["ProcessingResponse"]()
        streamed = getattr(response, phase).response.body_mutation.streamed_response
        streamed.body = part
        streamed.end_of_stream = ends and start + CHUNK_BYTES >= len(body)
        yield response


def immediate(answer: ErrorAnswer, body: bytes | None = None) -> Any:
    """Return the response that ends the request with an error; `body`: in place of the error's own."""
    response = CLASSES["ProcessingResponse"]()
    immediate_response = response.immediate_response
    immediate_response.status.code = envoy_status(answer)
    immediate_response.body = answer.body() if body is None else body
    immediate_response.details = f"dynamo_epp_{answer.label}"
    headers = {"content-type": "application/json"}
    if answer.retry_after_s is not None:
        headers["retry-after"] = str(answer.retry_after_s)
    for key, value in headers.items():
        option = immediate_response.headers.set_headers.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = key, value.encode()
    return response


def envoy_status(answer: ErrorAnswer) -> int:
    """Return the status that a gateway accepts: overload is 429, others that Envoy lacks become 400 or 500."""
    if any(low <= answer.status <= high for low, high in ENVOY_STATUS_RANGES):
        return answer.status
    if answer.label == "overload":
        return TOO_MANY_REQUESTS
    return 500 if answer.status >= 500 else 400
