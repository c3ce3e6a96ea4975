"""Bare writer: a uvloop program that answers chats with a fixed event per token and does nothing else.

    python benchmarks/bare_writer.py --http-port 8000

It shows the cost of the kernel and the event loop for the same writes at the same pace: no JSON, no tokens, no engine,
no metrics. `frontend_cpu --bare` measures it together with the frontends. All streams have a token at the same time, as
in an engine's step; the latest request sets the time between two tokens in its field `interval_ms`.
"""

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import cast

import uvloop

from benchmarks.metronome import next_beat
from benchmarks.stacks import HOST, MODEL_NAME
from dynamo.core.config import exit_on_config_error, load, option

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
INTERVAL = re.compile(rb'"interval_ms": *([0-9.]+)')
LIMIT = re.compile(rb'"max_tokens": *(\d+)')
TOKENS_DEFAULT = 16
INTERVAL_DEFAULT_MS = 13.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def chunk(data: bytes) -> bytes:
    """Return data as an HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(EVENT)


class Writer:
    """The streams and their pace."""

    def __init__(self, prompt_tokens: int) -> None:
        self.streams: set[WriterProtocol] = set()
        self.prompt_tokens = prompt_tokens
        self.interval_ms = INTERVAL_DEFAULT_MS

    async def write_forever(self) -> None:
        """Write a token to every stream at each interval."""
        while True:
            now = time.perf_counter()
            await asyncio.sleep(next_beat(now, self.interval_ms / 1e3, 0, 1) - now)
            for stream in list(self.streams):
                stream.write_token()


class WriterProtocol(asyncio.Protocol):
    """One connection; its answer is a stream of `left` more tokens."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._received = b""
        self._total = 0
        self.left = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses.

    def connection_lost(self, error: Exception | None) -> None:
        self._writer.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        limit = LIMIT.search(body)
        self._total = self.left = int(limit[1]) if limit else TOKENS_DEFAULT
        if b'"stream": true' in body:
            self.transport.write(HEAD)
            interval = INTERVAL.search(body)
            self._writer.interval_ms = float(interval[1]) if interval else self._writer.interval_ms
            self._writer.streams.add(self)
        else:
            answer = json.dumps({"data": [{"id": MODEL_NAME}]}).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )

    def write_token(self) -> None:
        """Write a token, and the end after the last one."""
        self.left -= 1
        if self.left:
            self.transport.write(TOKEN)
            return
        self._writer.streams.discard(self)
        usage = {"prompt_tokens": self._writer.prompt_tokens, "completion_tokens": self._total}
        last = f'data: {{"choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'.encode()
        self.transport.write(TOKEN + chunk(last) + b"0\r\n\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """Write a fixed event to each stream at every interval."""

    http_host: str = option(HOST, "--http-host", None, "Address to listen on")
    http_port: int = option(8000, "--http-port", None, "Port to listen on")
    router_mode: str = option("", "--router-mode", None, "Ignored")
    prompt_tokens: int = option(512, "--prompt-tokens", None, "Prompt tokens to report as usage")


async def serve(config: WriterConfig) -> None:
    """Serve until cancelled."""
    writer = Writer(config.prompt_tokens)
    await asyncio.get_running_loop().create_server(lambda: WriterProtocol(writer), config.http_host, config.http_port)
    await writer.write_forever()


def main() -> int:
    config = load(WriterConfig, sys.argv[1:], prog="python benchmarks/bare_writer.py")
    uvloop.run(serve(config))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
