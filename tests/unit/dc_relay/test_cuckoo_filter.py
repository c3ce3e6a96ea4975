"""CuckooFilter: addresses as released relays compute them, and no lost hash."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.dc_relay.cuckoo_filter import CuckooFilter, buckets_for


def test_bucket_counts_equal_those_of_released_relays() -> None:
    sizes = {1: 2, 7: 4, 64: 32, 102: 32, 103: 64, 122: 64, 1000: 512, 1_048_576: 524_288}
    assert {blocks: buckets_for(blocks) for blocks in sizes} == sizes


def test_hashes_are_at_the_addresses_that_a_released_relay_uses() -> None:
    """Both were moved to their other bucket in a released relay's snapshot, so that it shows both addresses."""
    for number, fingerprint, first, second in (
        (4314058110468087276, 11_508, 11, 12),
        (10274256444888746378, 61_145, 9, 17),
    ):
        blocks = CuckooFilter(32)
        for _ in range(5):
            blocks.insert(number)
        assert sorted(blocks.fingerprints()) == [*[(first, fingerprint)] * 4, (second, fingerprint)]


def test_hash_that_finds_both_buckets_full_displaces_another_one() -> None:
    blocks = CuckooFilter(2)
    inserted = [number for number in range(8) if blocks.insert(number)]
    assert len(inserted) >= 7
    assert all(number in blocks for number in inserted)


def test_insertion_into_a_full_filter_has_no_effect() -> None:
    blocks = CuckooFilter(2)
    for number in range(100):
        blocks.insert(number)
    before, blocks.changed = blocks.image(), set()
    assert not blocks.insert(1000)
    assert blocks.image() == before


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=200))
def test_filter_contains_every_inserted_and_not_removed_block(steps: list[tuple[bool, int]]) -> None:
    blocks, kept = CuckooFilter(32), set[int]()
    for inserts, number in steps:
        if inserts and number not in kept and blocks.insert(number):
            kept.add(number)
        elif not inserts and number in kept:
            blocks.remove(number)
            kept.discard(number)
    assert all(number in blocks for number in kept)
    assert sum(1 for _ in blocks.fingerprints()) == len(kept)
