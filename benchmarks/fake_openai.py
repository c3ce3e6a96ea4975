"""FakeOpenai: OpenAI-compatible server that answers every chat with the same text after a fixed delay.

    python benchmarks/fake_openai.py PORT DELAY_MS

HTTP backend of a gateway. It parses only the end of each request, so that its own share of the measured time is small.
"""

import asyncio
import json
import re
import sys
from typing import cast

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16
ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "bench",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * OUTPUT_TOKENS},
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": OUTPUT_TOKENS,
        "total_tokens": PROMPT_TOKENS + OUTPUT_TOKENS,
    },
}


def render(value: object) -> bytes:
    """Return a complete response."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def take(data: bytes) -> tuple[int, bytes]:
    """Return the number of complete requests, and the remaining bytes."""
    count = 0
    while (end := data.find(HEAD_END)) >= 0:
        length = LENGTH.search(data, 0, end)
        whole = end + len(HEAD_END) + (int(length[1]) if length else 0)
        if len(data) < whole:
            break
        count, data = count + 1, data[whole:]
    return count, data


class FakeOpenai(asyncio.Protocol):
    """One connection."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._response = render(ANSWER)
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        count, self._data = take(self._data + data)
        for _ in range(count):
            asyncio.get_running_loop().call_later(self._delay_s, self._answer)

    def _answer(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._response)


async def serve(port: int, delay_s: float) -> None:
    """Serve until the process is killed."""
    server = await asyncio.get_running_loop().create_server(lambda: FakeOpenai(delay_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
