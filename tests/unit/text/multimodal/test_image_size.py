"""The size of an image is read off its first bytes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.text.multimodal.image_size import size_of

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480)
EXIF = b"\xff\xe1" + struct.pack(">H", 300) + bytes(298)
FRAME = b"\xff\xc2" + struct.pack(">HBHH", 17, 8, 480, 640)
RIFF = b"RIFF" + bytes(4) + b"WEBP"


@pytest.mark.parametrize(
    "head",
    [
        PNG,
        b"GIF89a" + struct.pack("<HH", 640, 480),
        b"BM" + bytes(16) + struct.pack("<ii", 640, -480),
        b"\xff\xd8" + EXIF + b"\xff\xc4" + struct.pack(">H", 4) + bytes(2) + b"\xff" + FRAME,
        RIFF + b"VP8X" + bytes(8) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little"),
        RIFF + b"VP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 639 | 479 << 14),
        RIFF + b"VP8 " + bytes(10) + struct.pack("<HH", 640, 480),
    ],
    ids=["png", "gif", "bmp", "jpeg", "webp", "lossless webp", "lossy webp"],
)
def test_image_size_reads_every_common_format(head: bytes) -> None:
    assert size_of(head) == (640, 480)
    assert size_of(head[:-1]) is None or head[:4] == b"RIFF"


def test_image_size_of_other_data_is_none() -> None:
    assert size_of(b"") is None
    assert size_of(b"hello there") is None
    assert size_of(PNG[:16] + bytes(8)) is None


@given(st.sampled_from([b"", b"\xff\xd8", b"GIF8", b"BM", RIFF, PNG[:8]]), st.binary(max_size=64))
def test_image_size_of_random_data_raises_no_error(start: bytes, rest: bytes) -> None:
    size = size_of(start + rest)
    assert size is None or min(size) > 0
