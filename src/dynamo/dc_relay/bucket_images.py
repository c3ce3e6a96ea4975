"""Bucket images: the binary form of filter snapshots and deltas (CBI1). Pure.

    0  magic "CBI1"          8  fingerprint bits u8    12  seed u64            36  sequence u64
    4  version u16 (1)       9  slots per bucket u8    20  bucket count u64    44  low 32 bits of XXH3-64(body)
    6  flags u16            10  filter format u16      28  data center u64     48  body

The body of a snapshot chunk (flags 1) is its index and the number of chunks (u32), the first bucket (u64) and bucket
words (u64); of a delta (flags 2) the preceding sequence (u64), a count (u32), and a bucket (u32) and word (u64) each.
All integers are little-endian.
"""

import struct
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from dynamo.dc_relay.cuckoo_filter import FINGERPRINT_BITS, FORMAT_VERSION, SEED, SLOTS_PER_BUCKET, CuckooFilter

MAGIC = b"CBI1"
WIRE_VERSION = 1
SNAPSHOT_CHUNK, DELTA = 1, 2
CHUNK_BUCKETS = 512 * 1024
FRAME_BYTES_MAX = 4_194_368
_HEADER = struct.Struct("<4sHHBBHQQQQI")
_CHUNK = struct.Struct("<IIQ")
_DELTA = struct.Struct("<QI")
_IMAGE = struct.Struct("<IQ")
DELTA_IMAGES_MAX = (FRAME_BYTES_MAX - _HEADER.size - _DELTA.size) // _IMAGE.size


def snapshot_chunks(image: bytes, dc_id: int, sequence: int) -> Iterator[bytes]:
    """Yield the chunks of a filter's image."""
    buckets = len(image) // 8
    count = -(-buckets // CHUNK_BUCKETS)
    for index in range(count):
        first = index * CHUNK_BUCKETS
        words = image[8 * first : 8 * (first + CHUNK_BUCKETS)]
        yield _frame(SNAPSHOT_CHUNK, buckets, dc_id, sequence, _CHUNK.pack(index, count, first) + words)


def delta(filter: CuckooFilter, dc_id: int, base_sequence: int, sequence: int) -> bytes:
    """Return the changed buckets of a filter, at most `DELTA_IMAGES_MAX`."""
    buckets = sorted(filter.changed)
    images = b"".join(_IMAGE.pack(bucket, filter.word(bucket)) for bucket in buckets)
    return _frame(DELTA, filter.bucket_count, dc_id, sequence, _DELTA.pack(base_sequence, len(buckets)) + images)


def _frame(flags: int, buckets: int, dc_id: int, sequence: int, body: bytes) -> bytes:
    checksum = xxh3_64_intdigest(body) & 0xFFFF_FFFF
    layout = (FINGERPRINT_BITS, SLOTS_PER_BUCKET, FORMAT_VERSION)
    return _HEADER.pack(MAGIC, WIRE_VERSION, flags, *layout, SEED, buckets, dc_id, sequence, checksum) + body
