"""Long frames: splits the long data frames of a WebSocket client into fragments of the same message, as they arrive. Pure.

A frame may have 16 MB. Whole, it is collected, cut out of a buffer and unmasked in one piece, which takes some 20 ms of the event
loop. Fragments are unmasked one by one; the message is the same.
"""

CONTINUED, TEXT, BINARY = 0, 1, 2
DATA_OPCODES = (CONTINUED, TEXT, BINARY)
FINAL, OPCODE, MASKED, LENGTH = 0x80, 0x0F, 0x80, 0x7F
SHORT_MAX = 125
"""Most bytes of a frame whose head has no further length."""
SHORT_HEAD_BYTES = 6
"""Bytes of such a frame's head, with its mask."""
LONG_BYTES = 64 << 10
"""Longer data frames are split, into fragments of at most this size."""


class LongFrames:
    """Data of one client, up to the longest allowed frame; what is longer passes unchanged, for the protocol to refuse."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._head = b""
        """Begin of a frame whose head is not complete."""
        self._left = 0
        """Bytes that follow of the current frame."""
        self._first: int | None = None
        """First byte of the head of the next fragment; None while the current frame is not split."""
        self._mask = b""
        """Mask of the next fragment."""

    @property
    def rest_of_long(self) -> int:
        """The number of bytes that follow of a frame that is split; 0 outside of one."""
        return self._left if self._first is not None else 0

    def split(self, data: bytes) -> bytes:
        """Return data with fragments in place of long frames; a head that is not complete is kept for the next call."""
        found: list[bytes] = []
        at, size = 0, len(data)
        if self._head:
            data, self._head = self._head + data, b""
            size = len(data)
        elif not self._left:
            at = self._pass_short(data)
            if at >= size:
                self._left = at - size
                return data
            if at:
                found.append(data[:at])
        while at < size:
            if self._first is not None:
                end = min(at + self._left, at + LONG_BYTES, size)
                found += self._fragment(data[at:end])
            elif self._left:
                end = min(at + self._left, size)
                found.append(data[at:end])
                self._left -= end - at
            else:
                end = self._begin(data, at)
                if not end:
                    self._head = data[at:]
                    break
                if self._first is None:
                    found.append(data[at:end])
            at = end
        return found[0] if len(found) == 1 else b"".join(found)

    @staticmethod
    def _pass_short(data: bytes) -> int:
        """Return the end of the short frames at the beginning, the last of which may end beyond the data."""
        at, last = 0, len(data) - SHORT_HEAD_BYTES
        while at <= last and MASKED <= (second := data[at + 1]) <= MASKED | SHORT_MAX:
            at += second - MASKED + SHORT_HEAD_BYTES
        return at

    def _begin(self, data: bytes, at: int) -> int:
        """Begin the frame at a place and return the end of its head; 0 for a head that is not complete."""
        if len(data) < at + 2:
            return 0
        first, second = data[at], data[at + 1]
        length, end = second & LENGTH, at + 2
        if length > SHORT_MAX:
            end += 2 if length == 126 else 8
            length = int.from_bytes(data[at + 2 : end], "big")
        is_masked = bool(second & MASKED)
        end += 4 if is_masked else 0
        if end > len(data):
            return 0
        self._left = length
        if is_masked and first & OPCODE in DATA_OPCODES and LONG_BYTES < length <= self._bytes_max:
            self._first, self._mask = first, data[end - 4 : end]
        return end

    def _fragment(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the head of a fragment and its data, which follow in the current frame."""
        assert self._first is not None, "the frame is split"
        size, mask = len(data), self._mask
        self._left -= size
        first = self._first if not self._left else self._first & ~FINAL
        head = bytes((first, MASKED | 127)) + size.to_bytes(8, "big") + mask
        turn = size % 4
        self._mask = mask[turn:] + mask[:turn]
        self._first = None if not self._left else self._first & FINAL | CONTINUED
        return head, data
