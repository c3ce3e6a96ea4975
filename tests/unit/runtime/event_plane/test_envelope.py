"""Envelope: upstream's four frames."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.runtime.event_plane.envelope import EventEnvelope, pack, unpack

U64 = st.integers(0, 2**64 - 1)
ENVELOPE = EventEnvelope(0x197238FB8BD4F9, 3, 1_700_000_000_000, "kv-events", b"\x90")


def test_event_envelope_frames_equal_those_of_released_dynamo() -> None:
    topic, publisher, sequence, body = pack(ENVELOPE)
    assert topic == b"kv-events"
    assert publisher == bytes.fromhex("00197238fb8bd4f9")
    assert sequence == bytes.fromhex("0000000000000003")
    assert body[:1] == b"\x01"
    assert int.from_bytes(body[1:5], "big") == len(body) - 5
    assert msgspec.msgpack.decode(body[5:]) == {
        "publisher_id": 0x197238FB8BD4F9,
        "sequence": 3,
        "published_at": 1_700_000_000_000,
        "topic": "kv-events",
        "payload": b"\x90",
    }


@given(publisher=U64, sequence=U64, topic=st.text(min_size=1, max_size=9), payload=st.binary(max_size=30))
def test_event_envelope_round_trips(publisher: int, sequence: int, topic: str, payload: bytes) -> None:
    envelope = EventEnvelope(publisher, sequence, 1, topic, payload)
    assert unpack(pack(envelope)) == envelope


@given(frames=st.lists(st.binary(max_size=30), max_size=5))
def test_event_envelope_refuses_garbage(frames: list[bytes]) -> None:
    with pytest.raises(InvalidArgument):
        unpack(frames)


@pytest.mark.parametrize(
    ("index", "bad", "complaint"),
    [
        (1, b"\0" * 8, "differ in publisher or sequence"),
        (2, b"\0" * 8, "differ in publisher or sequence"),
        (3, b"\x02\0\0\0\0", "version 2"),
        (3, b"\x01\0\0\0\x09x", "length field 9"),
        (3, b"\x01\0\0\0\x01\xc1", "malformed event body"),
    ],
)
def test_event_envelope_error_names_the_broken_frame(index: int, bad: bytes, complaint: str) -> None:
    frames = pack(ENVELOPE)
    frames[index] = bad
    with pytest.raises(InvalidArgument, match=complaint):
        unpack(frames)
