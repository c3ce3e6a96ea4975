"""NativeEvents: publish a rank's KV events in vLLM's ZMQ format, with a replay socket.

PUB     topic · sequence number · [time, [events], rank]
ROUTER  a request holds the first sequence number; replies with every later message, and an empty one at the end
"""

import contextlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from dynamo.core.codec import msgpack_encode
from dynamo.core.listening import listen_error
from dynamo.protocols.kv_events import KvEvent, Removed, Stored

KEPT_MAX = 10_000  # Messages kept for replay, as in vLLM.
END = (-1).to_bytes(8, "big", signed=True)
NUMBER = struct.Struct(">Q")


def native(event: KvEvent, tokens_of: Mapping[int, Sequence[int]], block_tokens: int) -> dict[str, Any]:
    """Convert a device cache event to vLLM's format, with the fields that the released mocker uses."""
    if isinstance(event, Stored):
        hashes = [block.block_hash for block in event.blocks]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": event.parent_hash,
            "token_ids": [token for block_hash in hashes for token in tokens_of.get(block_hash, ())],
            "block_size": block_tokens,
            "group_idx": 0,
        }
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "group_idx": 0}
    return {"type": "AllBlocksCleared"}


class NativeEvents:
    """The publishing and replay sockets of one rank."""

    def __init__(self, host: str, port: int, replay_port: int | None, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_MAX)
        self._context = zmq.asyncio.Context()
        self._publisher = self._bind(zmq.PUB, host, port)
        self._router = None if replay_port is None else self._bind(zmq.ROUTER, host, replay_port)

    def publish(self, events: Sequence[dict[str, Any]], time_s: float) -> None:
        """Publish one message; a subscriber that is too slow misses it and has to request a replay."""
        number = NUMBER.pack(self._next)
        self._next += 1
        payload = msgpack_encode([time_s, list(events), self._dp_rank])
        self._kept.append((number, payload))
        with contextlib.suppress(zmq.Again):
            zmq.Socket.shadow(self._publisher).send_multipart([b"", number, payload], zmq.NOBLOCK)

    async def answer(self) -> None:
        """Serve replay requests until cancelled."""
        router = self._router
        if router is None:
            return
        while True:
            asker, *rest = await router.recv_multipart()
            start = rest[-1] if rest else b""
            if len(start) != NUMBER.size:
                continue
            for number, payload in list(self._kept):
                if number >= start:
                    await router.send_multipart([asker, b"", b"", number, payload])
            await router.send_multipart([asker, b"", b"", END, b""])

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _bind(self, kind: int, host: str, port: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise listen_error(f"--zmq-kv-events-ports, --zmq-replay-ports: {port}", host, error) from None
        return socket
