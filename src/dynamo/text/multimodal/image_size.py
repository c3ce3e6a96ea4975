"""ImageSize: width and height of an image, read from its first bytes without decoding it."""

import struct
from collections.abc import Callable

Size = tuple[int, int]
"""Width and height in pixels."""

HEAD_BYTES = 4096
"""Enough for any image but a JPEG with a large thumbnail or profile before its size."""

_JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})


def size_of(head: bytes) -> Size | None:
    """Return the size of a PNG, JPEG, GIF, WebP or BMP; None for other data or a size beyond these bytes."""
    for magic, read in _READERS:
        if head.startswith(magic):
            try:
                size = read(head)
            except (struct.error, IndexError):
                return None
            return size if size is not None and min(size) > 0 else None
    return None


def _png(head: bytes) -> Size | None:
    width, height = struct.unpack_from(">II", head, 16)
    return (width, height) if head[12:16] == b"IHDR" else None


def _gif(head: bytes) -> Size | None:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _bmp(head: bytes) -> Size | None:
    width, height = struct.unpack_from("<ii", head, 18)
    return width, abs(height)


def _webp(head: bytes) -> Size | None:
    kind = head[12:16]
    if head[8:12] != b"WEBP":
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(head: bytes) -> Size | None:
    place = 2
    while True:
        while head[place] != 0xFF:  # Between segments only fill bytes are allowed; other bytes are skipped.
            place += 1
        while head[place] == 0xFF:
            place += 1
        marker = head[place]
        place += 1
        if marker in _JPEG_ALONE:
            continue
        (length,) = struct.unpack_from(">H", head, place)
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", head, place + 3)
            return width, height
        place += length


_READERS: tuple[tuple[bytes, Callable[[bytes], Size | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"GIF8", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)
