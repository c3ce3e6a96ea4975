"""Bucket images: header, chunks and deltas have the documented layout."""

import struct

from xxhash import xxh3_64_intdigest

from dynamo.dc_relay.bucket_images import CHUNK_BUCKETS, DELTA_IMAGES_MAX, FRAME_BYTES_MAX, delta, snapshot_chunks
from dynamo.dc_relay.cuckoo_filter import SEED, CuckooFilter


def test_small_filter_snapshot_is_one_chunk_with_a_checksummed_header() -> None:
    blocks = CuckooFilter(2)
    blocks.insert(7)
    (chunk,) = snapshot_chunks(blocks.image(), 5, 9)
    body = chunk[48:]
    assert chunk[:8] == b"CBI1\x01\x00\x01\x00"
    assert struct.unpack("<BBHQQQQI", chunk[8:48]) == (
        16, 4, 1, SEED, 2, 5, 9, xxh3_64_intdigest(body) & 0xFFFF_FFFF,
    )  # fmt: skip
    assert body == struct.pack("<IIQQQ", 0, 1, 0, blocks.word(0), blocks.word(1))


def test_large_filter_is_sent_in_contiguous_chunks_within_the_frame_limit() -> None:
    image = bytes(8 * (CHUNK_BUCKETS * 2))
    chunks = list(snapshot_chunks(image, 1, 1))
    assert [struct.unpack("<IIQ", chunk[48:64]) for chunk in chunks] == [(0, 2, 0), (1, 2, CHUNK_BUCKETS)]
    assert all(len(chunk) == FRAME_BYTES_MAX for chunk in chunks)


def test_delta_has_the_words_of_the_changed_buckets() -> None:
    blocks = CuckooFilter(4)
    blocks.insert(7)
    (bucket,) = blocks.changed
    frame = delta(blocks, 5, 3, 4)
    assert struct.unpack("<HQ", frame[6:8] + frame[36:44]) == (2, 4)
    assert frame[48:] == struct.pack("<QIIQ", 3, 1, bucket, blocks.word(bucket))
    assert 48 + 12 + 12 * DELTA_IMAGES_MAX <= FRAME_BYTES_MAX < 48 + 12 + 12 * (DELTA_IMAGES_MAX + 1)
