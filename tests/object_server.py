"""Object store on loopback that serves its objects and can inject faults."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class ObjectServer(ThreadingHTTPServer):
    """HTTP server of objects by path."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.headers: list[dict[str, str]] = []
        self.status: int | None = None
        self.cut: int | None = None
        """Number of bytes of an object that are sent before the connection is closed; None for all."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def do_GET(self) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        body = self.server.objects.get(self.path)
        self.send_response(self.server.status or (404 if body is None else 200))
        body = body or b""
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut])
        self.close_connection = self.server.cut is not None

    def do_PUT(self) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.server.status or 200
        if status == 200:
            self.server.objects[self.path] = body
        self.send_response(status)
        self.send_header("etag", '"1"')
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...
