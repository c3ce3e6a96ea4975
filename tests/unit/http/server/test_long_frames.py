"""Long frames: fragments of the same message in place of a client's long data frames."""

import hypothesis.strategies as st
from hypothesis import given
from websockets.frames import Frame, Opcode
from websockets.protocol import SERVER
from websockets.protocol import Protocol as WebSocketProtocol

from dynamo.http.server.long_frames import LONG_BYTES, LongFrames

MESSAGE_BYTES_MAX = 4 * LONG_BYTES

SIZES = (0, 1, 125, 126, LONG_BYTES, LONG_BYTES + 1, 3 * LONG_BYTES + 7, MESSAGE_BYTES_MAX)


def client_frame(opcode: Opcode, data: bytes, *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def frames_of(parts: list[bytes]) -> list[Frame]:
    """Return the frames that the server's protocol reads."""
    protocol = WebSocketProtocol(SERVER, max_size=MESSAGE_BYTES_MAX)
    for part in parts:
        protocol.receive_data(part)
    assert protocol.parser_exc is None
    return [one for one in protocol.events_received() if isinstance(one, Frame)]


def messages_of(frames: list[Frame]) -> list[tuple[Opcode, bytes]]:
    found: list[tuple[Opcode, bytes]] = []
    for frame in frames:
        if frame.opcode is Opcode.CONT:
            kind, data = found.pop()
            found.append((kind, data + bytes(frame.data)))
        else:
            found.append((frame.opcode, bytes(frame.data)))
    return found


@given(st.lists(st.sampled_from(SIZES), max_size=4), st.lists(st.integers(1, 2 * LONG_BYTES), max_size=5))
def test_messages_are_the_same_at_any_segmentation(sizes: list[int], cuts: list[int]) -> None:
    sent = [bytes(place % 251 for place in range(min(size, 1000))).ljust(size, b"x") for size in sizes]
    data = b"".join(client_frame(Opcode.TEXT, one) + client_frame(Opcode.PING, b"p") for one in sent)
    frames, splitting, at = LongFrames(MESSAGE_BYTES_MAX), list[bytes](), 0
    for cut in [*cuts, *[1] * 8]:  # Of the rest, the first bytes one by one.
        splitting.append(frames.split(data[at : at + cut]))
        at += cut
    splitting.append(frames.split(data[at:]))
    received = frames_of(splitting)
    assert all(len(frame.data) <= LONG_BYTES for frame in received)
    expected = [(kind, body) for one in sent for kind, body in ((Opcode.TEXT, one), (Opcode.PING, b"p"))]
    assert messages_of(received) == expected
    assert frames.rest_of_long == 0


def test_fragments_of_a_long_frame_are_passed_on_before_it_is_complete() -> None:
    frames = LongFrames(MESSAGE_BYTES_MAX)
    whole = client_frame(Opcode.BINARY, b"a" * (3 * LONG_BYTES))
    (first,) = frames_of([frames.split(whole[: LONG_BYTES + 14])])
    assert (first.opcode, first.fin, len(first.data)) == (Opcode.BINARY, False, LONG_BYTES)
    assert frames.rest_of_long == 2 * LONG_BYTES


def test_a_split_fragment_of_a_message_is_not_its_end() -> None:
    frames = LongFrames(MESSAGE_BYTES_MAX)
    parts = [
        client_frame(Opcode.TEXT, b"a" * (LONG_BYTES + 1), fin=False),
        client_frame(Opcode.CONT, b"b" * (LONG_BYTES + 1)),
    ]
    received = frames_of([frames.split(part) for part in parts])
    assert [frame.fin for frame in received] == [False, False, False, True]
    assert [frame.opcode for frame in received] == [Opcode.TEXT, Opcode.CONT, Opcode.CONT, Opcode.CONT]


def test_a_frame_beyond_the_limit_is_refused_at_its_head() -> None:
    frames = LongFrames(MESSAGE_BYTES_MAX)
    head = client_frame(Opcode.TEXT, b"a" * (MESSAGE_BYTES_MAX + 1))[:14]
    protocol = WebSocketProtocol(SERVER, max_size=MESSAGE_BYTES_MAX)
    protocol.receive_data(frames.split(head))
    assert protocol.parser_exc is not None
