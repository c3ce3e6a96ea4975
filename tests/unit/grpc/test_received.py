"""Decoding of received messages, which are written here field by field."""

import threading
from typing import Any

import pytest
from tests.unit.grpc.kserve_stack import tensor_request, text_request

from dynamo.core.errors import InvalidArgument
from dynamo.grpc import received as module
from dynamo.grpc.messages import CLASSES
from dynamo.grpc.received import (
    FIELDS_MAX,
    NUMBERS_MAX,
    MalformedFields,
    TooManyFields,
    count_fields,
    has_few_fields,
    received,
    wire_fields,
)

INFER = "ModelInferRequest"


def field(number: int, data: bytes) -> bytes:
    """Return a field that has a length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def count(data: bytes, fields_max: int = 100, numbers_max: int = 100) -> int:
    return count_fields(data, wire_fields(INFER), fields_max, numbers_max)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (CLASSES[INFER](), 0),
        (CLASSES[INFER](model_name="a" * 300, id="b"), 2),
        (tensor_request(1, 2, 3), 8),  # The name, the id; the input, with a name, a type, a shape, and contents in one field.
        (tensor_request(1, raw=True), 7),
        (text_request("a", max_tokens=7), 12),
    ],
)  # fmt: skip
def test_all_fields_of_a_message_and_of_its_parts_are_counted(message: Any, fields: int) -> None:
    assert count(message.SerializeToString()) == fields


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (field(4, b"") * 101, "parameters"),
        (field(5, field(5, field(8, b"") * 101)), "bytes_contents"),
        (field(6, field(2, b"") * 101), "parameters"),
        (field(99, b"a") * 101, "unknown fields"),
        (b"\xf8\x06\x01" * 101, "unknown fields"),
        (field(5, field(5, b"\x18\x01" * 101)), "int64_contents"),
        (field(5, field(3, b"\x01" * 101)), "shape"),
        (field(5, field(5, field(3, b"\x01" * 51))) * 2, "int64_contents"),
        (field(5, field(5, field(6, b"\0" * 404))), "fp32_contents"),
        (field(5, field(5, field(7, b"\0" * 808))), "fp64_contents"),
    ],
)
def test_too_many_fields_are_refused_with_the_name_of_the_field(data: bytes, named: str) -> None:
    with pytest.raises(TooManyFields, match=f"^{named}: .* 100 "):
        count(data)
    assert count(data, 1000, 1000) <= 1000
    CLASSES[INFER].FromString(data)


def test_counting_ends_at_the_limit_and_skips_values() -> None:
    class Touched(bytes):
        reads = 0

        def __getitem__(self, at: Any) -> Any:
            Touched.reads += 1
            return super().__getitem__(at)

    with pytest.raises(TooManyFields):
        count(Touched(field(4, b"") * 100_000))
    assert Touched.reads <= 2 * 101
    Touched.reads = 0
    assert count(Touched(field(7, b"a" * 100_000))) == 1
    assert Touched.reads <= 5


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05a",
        b"\x2a\x03\x0a\x09a",  # The name of an input ends behind the input.
        b"\x09\0\0",
        b"\x0b\x0c",
        b"\x08" + b"\xff" * 11,
        b"\xff" * 11,
    ],
)
def test_malformed_fields_are_an_error(data: bytes) -> None:
    with pytest.raises(MalformedFields):
        count(data)


@pytest.mark.parametrize("data", [b"\x0a\x05a", b"\x0a\x01\xff", field(7, b"a" * 5000) + b"\x0b\x0c", b"\xff" * 9000])
async def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"not a {INFER}"):
        await received(INFER, data)


async def test_only_messages_of_many_fields_leave_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, threads = module._decoded, list[threading.Thread]()

    def observed(kind: str, data: bytes) -> Any:
        threads.append(threading.current_thread())
        return decode(kind, data)

    monkeypatch.setattr(module, "_decoded", observed)
    here = threading.current_thread()
    short, texts = text_request("hello"), text_request("a" * 200_000)
    numbers, long = tensor_request(*range(200_000)), tensor_request(*range(300_000), raw=True)
    many = CLASSES[INFER](raw_input_contents=[b"a"] * 5000)
    for message, stays in ((short, True), (texts, True), (numbers, False), (long, False), (many, False)):
        assert await received(INFER, message.SerializeToString()) == message
        assert (threads.pop() is here) is stays


async def test_messages_within_the_limits_are_accepted_and_others_refused() -> None:
    inputs, numbers = CLASSES[INFER](), CLASSES[INFER]()
    inputs.raw_input_contents.extend([b""] * FIELDS_MAX)
    numbers.inputs.add().contents.bool_contents.extend([True] * NUMBERS_MAX)
    for message in (inputs, numbers):
        assert await received(INFER, message.SerializeToString()) == message
    inputs.raw_input_contents.append(b"")
    numbers.inputs[0].contents.bool_contents.append(True)
    for message, param in ((inputs, "raw_input_contents"), (numbers, "bool_contents")):
        with pytest.raises(InvalidArgument) as raised:
            await received(INFER, message.SerializeToString())
        assert raised.value.param == param


def test_messages_of_every_kind_have_fields() -> None:
    assert wire_fields("ServerLiveRequest") == {}
    assert has_few_fields("ModelReadyRequest", field(1, b"a" * 100_000))
    assert not has_few_fields("ModelReadyRequest", field(1, b"a" * 300_000))
