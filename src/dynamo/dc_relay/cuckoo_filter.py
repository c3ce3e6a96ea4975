"""CuckooFilter: a set of sequence hashes in buckets of four 16-bit fingerprints (Fan et al., CoNEXT 2014). Pure.

A hash has two candidate buckets. Consumers look it up by the same computation, so every constant here is part of the
wire format, version 1:

    mixed       = XXH3-64(seed, LE u64 hash)
    fingerprint = mixed & 0xffff, or 1 if that is 0
    bucket a    = (mixed >> 16) & (buckets - 1)
    bucket b    = bucket a ^ (XXH3-64(seed ^ 0x9E3779B97F4A7C15, LE u16 fingerprint) & (buckets - 1), or 1 if that is 0)
"""

import struct
import sys
from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 1
SEED = 0x5DEECE66D1B54A33
ALTERNATE_SEED = SEED ^ 0x9E3779B97F4A7C15
FINGERPRINT_BITS = 16
SLOTS_PER_BUCKET = 4
BUCKETS_MIN, BUCKETS_MAX = 2, 16_777_216
LOAD_MAX = 0.8
"""Share of the slots that the expected number of blocks occupies."""
MOVES_MAX = 500  # Fingerprints moved for one insertion: at 95% of the slots used, insertions need fewer.
_FINGERPRINT = (1 << FINGERPRINT_BITS) - 1
_SHIFTS = tuple(FINGERPRINT_BITS * slot for slot in range(SLOTS_PER_BUCKET))


def buckets_for(blocks: int) -> int:
    """Return the bucket count for an expected number of blocks: a power of two, possibly above `BUCKETS_MAX`."""
    count = BUCKETS_MIN
    while blocks > LOAD_MAX * SLOTS_PER_BUCKET * count:
        count *= 2
    return count


class CuckooFilter:
    """Filter with a fixed number of buckets, a power of two. An inserted hash must be removed at most once."""

    def __init__(self, bucket_count: int) -> None:
        self.bucket_count = bucket_count
        self.changed: set[int] = set()
        """Buckets that changed since the caller last cleared the set."""
        self._mask = bucket_count - 1
        self._words = array("Q", bytes(8 * bucket_count))
        self._next_slot = 0

    def word(self, bucket: int) -> int:
        """Return the four fingerprints of a bucket, the first in the least significant bits."""
        return self._words[bucket]

    def image(self) -> bytes:
        """Return all buckets, little-endian."""
        if sys.byteorder == "little":
            return self._words.tobytes()
        swapped = array("Q", self._words)
        swapped.byteswap()
        return swapped.tobytes()

    def __contains__(self, sequence_hash: int) -> bool:
        fingerprint, first = self._address(sequence_hash)
        return any(
            self._slot(bucket, fingerprint) is not None for bucket in (first, self._alternate(first, fingerprint))
        )

    def insert(self, sequence_hash: int) -> bool:
        """Insert a hash. Return False, and change nothing, if there is no room for it."""
        fingerprint, first = self._address(sequence_hash)
        for bucket in (first, self._alternate(first, fingerprint)):
            free = self._slot(bucket, 0)
            if free is not None:
                self._write(bucket, free, fingerprint)
                return True
        return self._displace(first, fingerprint)

    def remove(self, sequence_hash: int) -> None:
        """Remove an inserted hash."""
        fingerprint, first = self._address(sequence_hash)
        for bucket in (first, self._alternate(first, fingerprint)):
            slot = self._slot(bucket, fingerprint)
            if slot is not None:
                self._write(bucket, slot, 0)
                return

    def _displace(self, bucket: int, fingerprint: int) -> bool:
        """Move fingerprints to their other buckets until one is free; undo the moves if none is found."""
        moves: list[tuple[int, int, int]] = []
        for _ in range(MOVES_MAX):
            slot = self._next_slot = (self._next_slot + 1) % SLOTS_PER_BUCKET
            displaced = (self._words[bucket] >> _SHIFTS[slot]) & _FINGERPRINT
            moves.append((bucket, slot, displaced))
            self._write(bucket, slot, fingerprint)
            bucket, fingerprint = self._alternate(bucket, displaced), displaced
            free = self._slot(bucket, 0)
            if free is not None:
                self._write(bucket, free, fingerprint)
                return True
        for moved_bucket, slot, displaced in reversed(moves):
            self._write(moved_bucket, slot, displaced)
        return False

    def _address(self, sequence_hash: int) -> tuple[int, int]:
        mixed = xxh3_64_intdigest(struct.pack("<Q", sequence_hash), SEED)
        return mixed & _FINGERPRINT or 1, (mixed >> FINGERPRINT_BITS) & self._mask

    def _alternate(self, bucket: int, fingerprint: int) -> int:
        return bucket ^ (xxh3_64_intdigest(struct.pack("<H", fingerprint), ALTERNATE_SEED) & self._mask or 1)

    def _slot(self, bucket: int, fingerprint: int) -> int | None:
        """Return the first slot of a bucket with a fingerprint; 0 is an empty slot."""
        word = self._words[bucket]
        return next((slot for slot in range(SLOTS_PER_BUCKET) if _fingerprint(word, slot) == fingerprint), None)

    def _write(self, bucket: int, slot: int, fingerprint: int) -> None:
        shift = _SHIFTS[slot]
        self._words[bucket] = self._words[bucket] & ~(_FINGERPRINT << shift) | fingerprint << shift
        self.changed.add(bucket)

    def fingerprints(self) -> Iterator[tuple[int, int]]:
        """Yield the bucket and the fingerprint of each occupied slot."""
        for bucket, word in enumerate(self._words):
            for slot in range(SLOTS_PER_BUCKET if word else 0):
                fingerprint = _fingerprint(word, slot)
                if fingerprint:
                    yield bucket, fingerprint


def _fingerprint(word: int, slot: int) -> int:
    return (word >> _SHIFTS[slot]) & _FINGERPRINT
