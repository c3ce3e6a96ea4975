"""An OTLP/gRPC collector in a process of its own, because gRPC does not share a process with the forks of other tests.

    python -m tests.otlp_grpc_collector ADDRESS

Prints one JSON object for each span and each log record: `{"kind", "service", "name", "trace_id"}`; first, when it listens, an empty one.
"""

import json
import sys
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def service_of(resource: Any) -> str:
    return next(one.value.string_value for one in resource.attributes if one.key == "service.name")


def emit(kind: str, service: str, name: str, trace_id: bytes) -> None:
    print(json.dumps({"kind": kind, "service": service, "name": name, "trace_id": trace_id.hex()}), flush=True)


class Traces(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Receiver of spans."""

    def Export(self, request: Any, context: Any) -> Any:
        for one in request.resource_spans:
            for scope in one.scope_spans:
                for span in scope.spans:
                    emit("span", service_of(one.resource), span.name, span.trace_id)
        return trace_service_pb2.ExportTraceServiceResponse()


class Logs(logs_service_pb2_grpc.LogsServiceServicer):  # type: ignore[misc]
    """Receiver of log records."""

    def Export(self, request: Any, context: Any) -> Any:
        for one in request.resource_logs:
            for scope in one.scope_logs:
                for record in scope.log_records:
                    emit("log", service_of(one.resource), record.body.string_value, record.trace_id)
        return logs_service_pb2.ExportLogsServiceResponse()


def main() -> int:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    print("{}", flush=True)  # The server listens.
    server.wait_for_termination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
