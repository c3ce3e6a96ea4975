"""Client side of ext_proc as in a gateway, from Envoy's public protobuf definitions: one stream for each HTTP request."""

import json
import queue
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf import struct_pb2
from tests.cluster.processes import DEADLINE_S

Mode = processing_mode_pb2.ProcessingMode
DUPLEX, BUFFERED, STREAMED = Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED, Mode.STREAMED
CHAT_PATH = "/v1/chat/completions"
DESTINATION = "x-gateway-destination-endpoint"


def config_of(request: int, response: int | None = None) -> ext_proc.ProtocolConfiguration:
    """Return the protocol configuration of a stream."""
    modes = {"request_body_mode": request, "response_body_mode": request if response is None else response}
    return ext_proc.ProtocolConfiguration(**modes)


def headers_of(values: Mapping[str, str]) -> base_pb2.HeaderMap:
    """Return a header map; values are raw bytes, as Envoy sends them."""
    return base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()]
    )


class GatewayStream:
    """One HTTP request of a gateway on its ext_proc stream."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._sent: queue.SimpleQueue[ext_proc.ProcessingRequest | None] = queue.SimpleQueue()
        stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
        self.call = stub.Process(self._messages(), timeout=DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the stream from the gateway's side and wait until the picker has ended it too."""
        self._sent.put(None)
        for _ in self.call:
            pass

    def send(self, **fields: Any) -> None:
        """Send a message."""
        self._sent.put(ext_proc.ProcessingRequest(**fields))

    def receive(self) -> ext_proc.ProcessingResponse:
        """Return the next response."""
        return next(self.call)

    def request_headers(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = CHAT_PATH,
        method: str = "POST",
        mode: int | None = DUPLEX,
        ends: bool = False,
        subset: Iterable[str] | None = None,
    ) -> None:
        """Send the request's headers."""
        given = {":method": method, ":path": path, ":authority": "gateway", **(headers or {})}
        message: dict[str, Any] = {
            "request_headers": ext_proc.HttpHeaders(headers=headers_of(given), end_of_stream=ends)
        }
        if mode is not None:
            message["protocol_config"] = config_of(mode)
        if subset is not None:
            hint = struct_pb2.Struct()
            hint.update({f"{DESTINATION}-subset": ",".join(subset)})
            message["metadata_context"] = base_pb2.Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
        self.send(**message)

    def request_body(self, body: bytes, *, ends: bool = True) -> None:
        """Send a part of the request's body."""
        self.send(request_body=ext_proc.HttpBody(body=body, end_of_stream=ends))

    def response_headers(self, *, ends: bool = False) -> ext_proc.ProcessingResponse:
        """Send the response's headers; return the picker's response."""
        self.send(response_headers=ext_proc.HttpHeaders(headers=headers_of({":status": "200"}), end_of_stream=ends))
        return self.receive()

    def response_body(self, body: bytes, *, ends: bool) -> ext_proc.ProcessingResponse:
        """Send a part of the response; return the picker's response."""
        self.send(response_body=ext_proc.HttpBody(body=body, end_of_stream=ends))
        return self.receive()

    def pick(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, **more: Any) -> dict[str, str]:
        """Send a whole request as GAIE's gateways do; return the headers that the picker sets."""
        self.request_headers(headers, **more)
        self.request_body(json.dumps(body).encode())
        answer = self.receive()
        assert answer.WhichOneof("response") == "request_headers", answer
        assert self.receive().request_body.response.body_mutation.streamed_response.end_of_stream
        return mutated(answer.request_headers.response)

    def _messages(self) -> Iterator[ext_proc.ProcessingRequest]:
        while (message := self._sent.get()) is not None:
            yield message


def mutated(common: ext_proc.CommonResponse) -> dict[str, str]:
    """Return the headers that a response sets."""
    return {one.header.key: one.header.raw_value.decode() for one in common.header_mutation.set_headers}


def refusal(answer: ext_proc.ProcessingResponse) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, JSON body and headers of an immediate response."""
    assert answer.WhichOneof("response") == "immediate_response", answer
    immediate = answer.immediate_response
    headers = {one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body), headers
