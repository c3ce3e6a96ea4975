"""OTLP/HTTP collector that receives the exports of the real SDK over loopback."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Collector that stores every received span and log record."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.logs: list[LogRecord] = []
        self.services: set[str] = set()
        self.service_of: dict[bytes, str] = {}
        """Service of each span, by the span's id."""
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.add(self.path)
                if self.path.endswith("/logs"):
                    collector.add_logs(ExportLogsServiceRequest.FromString(body))
                else:
                    collector.receive_event(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make a process export its spans here without delay."""
        return {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def receive_event(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(facts["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.service_of |= dict.fromkeys([span.span_id for span in scope.spans], facts["service.name"])

    def add_logs(self, request: ExportLogsServiceRequest) -> None:
        for resource in request.resource_logs:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(facts["service.name"])
            for scope in resource.scope_logs:
                self.logs += scope.log_records

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def facts_of(span: Span | LogRecord) -> dict[str, str | int]:
    """Return the attributes of a span or a log record."""
    return {
        one.key: one.value.int_value if one.value.HasField("int_value") else one.value.string_value
        for one in span.attributes
    }
