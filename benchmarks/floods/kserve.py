"""Attacks of `floods` on the KServe server (gRPC), and the client of its stream.

Status 200 is gRPC's OK; other statuses are those of gRPC. The stream is read by a process of its own:

    python -m benchmarks.floods.kserve FILE PORT < MESSAGE
"""

import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import hpack

from benchmarks.floods.attacks import MEGA, text
from benchmarks.floods.connections import ConnectionAttack
from benchmarks.floods.records import ARRIVAL
from benchmarks.floods.send import TIMEOUT_S, Shot
from benchmarks.stacks import HOST, MODEL_NAME
from dynamo.grpc.messages import CLASSES, SERVICE
from dynamo.http2 import frames

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
STREAMED_TOKENS = 1_000_000
ROUNDS = 10_000


@dataclass(frozen=True, slots=True)
class KserveAttack:
    """One message, sent so often over one connection."""

    name: str
    message: Callable[[], bytes]
    method: str = "ModelInfer"
    count: int = 1
    clients: int = 1

    def prepare(self) -> Shot:
        """Return a function that sends the message and awaits the statuses."""
        data = self.message()
        return lambda port: infer(port, data, self.method, self.count)


def infer(port: int, message: bytes, method: str = "ModelInfer", count: int = 1) -> tuple[int, str]:
    """Send a serialized message, `count` times at the same time; return the last status and its details."""
    with grpc.insecure_channel(f"{HOST}:{port}", UNLIMITED) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        pending = [call.future(message, timeout=TIMEOUT_S) for _ in range(count)]
        codes = [one.code() for one in pending]
        details = str(pending[-1].details() or "")
    return 200 if codes[-1] is grpc.StatusCode.OK else int(codes[-1].value[0]), details


def text_request(prompt: bytes, *, tokens: int = 2, streams: bool = False, **parameters: str) -> bytes:
    """Return a text request as a message."""
    message = CLASSES["ModelInferRequest"](model_name=MODEL_NAME)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt)
    if streams:
        message.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    message.parameters["max_tokens"].int64_param = tokens
    message.parameters["ignore_eos"].bool_param = True
    for name, value in parameters.items():
        message.parameters[name].string_param = value
    return bytes(message.SerializeToString())


def kserve_attacks() -> "Iterator[KserveAttack | ConnectionAttack]":
    """Yield the attacks, the writers not yet called."""
    yield KserveAttack("a prompt of 15 MB over gRPC", lambda: text_request(text(15 * MEGA).encode()))
    yield KserveAttack("a prompt of 100 MB over gRPC", lambda: text_request(b"a" * (100 * MEGA)))
    yield KserveAttack("a message of 250 MB over gRPC", lambda: text_request(b"a" * (250 * MEGA)))
    yield KserveAttack("8 prompts of 15 MB over gRPC", lambda: text_request(text(15 * MEGA).encode()), clients=8)
    yield KserveAttack("8 prompts of 100 MB over gRPC", lambda: text_request(b"a" * (100 * MEGA)), clients=8)
    yield KserveAttack("20,000,000 numbers over gRPC", partial(_numbers, 20 * MEGA))
    yield KserveAttack("1,000,000 strings over gRPC", partial(_strings, MEGA))
    yield KserveAttack("10,000,000 empty strings over gRPC", partial(_strings, 10 * MEGA, b""))
    yield KserveAttack("1,000,000 inputs over gRPC", partial(_inputs, MEGA))
    yield KserveAttack("1,000,000 raw inputs over gRPC", lambda: _field(7, b"a") * MEGA)
    yield KserveAttack("1,000,000 parameters over gRPC", partial(_parameters, MEGA))
    yield KserveAttack("a parameter of 15 MB over gRPC", lambda: text_request(b"a", stop="a" * (15 * MEGA)))
    yield KserveAttack("a model name of 50 MB over gRPC", lambda: _field(1, b"a" * (50 * MEGA)))
    yield KserveAttack("50 MB of unknown fields over gRPC", lambda: _field(99, b"") * (25 * MEGA))
    yield KserveAttack("a model of 50 MB, ready over gRPC", lambda: _field(1, b"a" * (50 * MEGA)), "ModelReady")
    yield from _within_limit()
    yield KserveAttack("2,000 requests at once over gRPC", lambda: text_request(b"hello"), count=2000)
    for name, data in (
        ("10,000 reset requests", _resets),
        ("100,000 pings", lambda: frames.frame(frames.PING, 0, 0, b"12345678") * 10 * ROUNDS),
        ("100,000 settings", lambda: frames.frame(frames.SETTINGS, 0, 0, b"") * 10 * ROUNDS),
        ("10 MB of headers", _headers),
    ):
        yield ConnectionAttack(f"{name} over HTTP/2", partial(_opened, data))


def _within_limit() -> Iterator[KserveAttack]:
    """Yield messages that are nearly as long as the default limit."""
    longest = 4 * MEGA - 1000
    yield KserveAttack("a prompt of 4 MB over gRPC", lambda: text_request(text(longest).encode()))
    yield KserveAttack("8 prompts of 4 MB over gRPC", lambda: text_request(text(longest).encode()), clients=8)
    yield KserveAttack("a parameter of 4 MB over gRPC", lambda: text_request(b"a", stop="a" * longest))
    yield KserveAttack("a model name of 4 MB over gRPC", lambda: _field(1, b"a" * longest))
    yield KserveAttack("a model of 4 MB, ready over gRPC", lambda: _field(1, b"a" * longest), "ModelReady")
    yield KserveAttack("1,000,000 numbers over gRPC", partial(_numbers, 1_000_000))
    yield KserveAttack("4,000,000 numbers over gRPC", partial(_numbers, 4_000_000))
    yield KserveAttack("4,000,000 raw numbers over gRPC", partial(_raw_numbers, 4_000_000))
    yield KserveAttack("60,000 strings over gRPC", partial(_strings, 60_000))
    yield KserveAttack("2,000,000 empty strings over gRPC", partial(_strings, 2_000_000, b""))
    yield KserveAttack("20,000 inputs over gRPC", partial(_inputs, 20_000))
    yield KserveAttack("15,000 parameters over gRPC", partial(_parameters, 15_000))
    yield KserveAttack("200,000 parameters over gRPC", partial(_parameters, 200_000))
    yield KserveAttack("4 MB of unknown fields over gRPC", lambda: _field(99, b"") * (longest // 3))


def _opened(data: Callable[[], bytes]) -> bytes:
    """Return the beginning of an HTTP/2 connection, this data, and an invalid frame, at which the server closes."""
    return frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"") + data() + b"\xff" * 32


def _resets() -> bytes:
    head = [
        (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/ServerLive"), (":authority", "a"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    block = hpack.Encoder().encode(head, huffman=False)
    found = []
    for number in range(ROUNDS):
        stream = 2 * number + 1
        found.append(frames.frame(frames.HEADERS, 4, stream, block))  # 4: the end of the headers.
        found.append(frames.frame(frames.RST_STREAM, 0, stream, struct.pack("!I", 8)))
    return b"".join(found)


def _headers() -> bytes:
    first = frames.frame(frames.HEADERS, 0, 1, b"\x00\x01a\x01b" * 1000)
    return first + frames.frame(frames.CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 3000) * 700


def _field(number: int, data: bytes) -> bytes:
    """Return a field of a message that has a length."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _numbers(count: int) -> bytes:
    """Return a request with so many numbers of one byte each."""
    contents = _field(5, _field(3, b"\x07" * count))
    return _field(1, MODEL_NAME.encode()) + _field(5, _field(1, b"numbers") + _field(2, b"INT64") + contents)


def _raw_numbers(count: int) -> bytes:
    """Return a request with so many numbers of one byte each in raw contents."""
    tensor = _field(1, b"numbers") + _field(2, b"INT8") + _field(3, _varint(count))
    return _field(1, MODEL_NAME.encode()) + _field(5, tensor) + _field(7, b"\x07" * count)


def _strings(count: int, each: bytes = b"aaaaaaaa") -> bytes:
    contents = _field(5, _field(8, each) * count)
    return _field(1, MODEL_NAME.encode()) + _field(5, _field(1, b"text_input") + _field(2, b"BYTES") + contents)


def _inputs(count: int) -> bytes:
    return _field(1, MODEL_NAME.encode()) + _field(5, _field(1, b"a") + _field(2, b"INT8")) * count


def _parameters(count: int) -> bytes:
    value = _field(2, b"\x08\x01")  # A parameter that is true.
    named = (_field(4, _field(1, b"%d" % number) + value) for number in range(count))
    return _field(1, MODEL_NAME.encode()) + b"".join(named)


def main() -> int:
    """Record when the parts of one stream arrive, until it ends."""
    path, port = sys.argv[1], int(sys.argv[2])
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    message = text_request(b"hello", tokens=STREAMED_TOKENS, streams=True)
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        answers: Any = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter([message]))
        for _ in answers:
            os.write(out, ARRIVAL.pack(time.perf_counter(), 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
