"""Minimal WebSocket client for tests against real processes."""

import base64
import json
import socket
from typing import Any


class Line:
    """WebSocket connection that sends and receives JSON events."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(bytes(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode()
        )
        self.file = self.socket.makefile("rb")
        assert self.file.readline().startswith(b"HTTP/1.1 101 ")
        while self.file.readline() != b"\r\n":
            pass

    def send_event(self, event: Any) -> None:
        data = json.dumps(event).encode()
        size = bytes([0x80 | 127]) + len(data).to_bytes(8, "big")
        self.socket.sendall(b"\x81" + size + bytes(4) + data)  # A mask of zeros does not change the payload.

    def receive_event(self) -> Any:
        op, size = self.file.read(2)
        assert op == 0x81
        if size >= 126:
            size = int.from_bytes(self.file.read(2 if size == 126 else 8), "big")
        return json.loads(self.file.read(size))

    def close(self) -> None:
        self.file.close()
        self.socket.close()
