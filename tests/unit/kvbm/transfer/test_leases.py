"""Leases: blocks are freed once, and never while a reader holds them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.kvbm.transfer.leases import Leases, TransferLease


def test_lease_ends_on_release() -> None:
    leases = Leases(blocks_max=10, slots=4)
    lease, freed = leases.grant("a", [1, 2], 5.0)
    assert lease is not None
    assert (freed, leases.held, len(leases)) == ([], 2, 1)
    assert leases.release("a") == (True, [lease])
    assert leases.release("a") == (False, [])
    assert leases.held == 0


def test_lease_ends_at_its_deadline() -> None:
    leases = Leases(blocks_max=10, slots=4)
    first, _ = leases.grant("a", [1], 5.0)
    second, _ = leases.grant("b", [2], 7.0)
    assert leases.next_expiry == 5.0
    assert leases.expire(4.9) == []
    assert leases.expire(5.0) == [first]
    assert leases.find("a") is None
    assert leases.find("b") is second
    assert leases.expired == 1


def test_lease_frees_blocks_only_after_reading() -> None:
    leases = Leases(blocks_max=10, slots=4)
    lease, _ = leases.grant("a", [1], 5.0)
    assert leases.pin("a") is lease
    assert leases.pin("a") is lease
    assert leases.expire(6.0) == []
    assert leases.pin("a") is None
    assert lease is not None
    assert leases.unpin(lease) == []
    assert leases.unpin(lease) == [lease]


def test_lease_table_evicts_the_oldest_unread_lease() -> None:
    leases = Leases(blocks_max=4, slots=4)
    read, _ = leases.grant("read", [1, 2], 9.0)
    idle, _ = leases.grant("idle", [3, 4], 9.0)
    leases.pin("read")
    assert read is not None
    newest, freed = leases.grant("new", [5], 9.0)
    assert newest is not None
    assert freed == [idle]
    leases.pin("new")
    assert leases.grant("more", [6, 7], 9.0) == (None, [])


def test_lease_table_skips_a_lease_larger_than_its_bound() -> None:
    leases = Leases(blocks_max=2, slots=4)
    leases.grant("a", [1], 9.0)
    assert leases.grant("b", [2, 3, 4], 9.0) == (None, [])
    assert leases.find("a") is not None


def test_lease_table_bounds_slots() -> None:
    leases = Leases(blocks_max=100, slots=2)
    first, _ = leases.grant("a", [1], 9.0)
    leases.grant("b", [2], 9.0)
    third, freed = leases.grant("c", [3], 9.0)
    assert freed == [first]
    assert third is not None
    assert first is not None
    assert third.slot == first.slot


def test_lease_table_releases_the_oldest_on_demand() -> None:
    leases = Leases(blocks_max=10, slots=4)
    assert leases.drop_oldest() == []
    first, _ = leases.grant("a", [1], 9.0)
    leases.grant("b", [2], 9.0)
    assert leases.drop_oldest() == [first]
    assert [lease.transfer_id for lease in leases.clear()] == ["b"]


STEP = st.tuples(
    st.sampled_from(["grant", "pin", "unpin", "release", "expire", "drop", "clear"]),
    st.integers(0, 5),
    st.integers(1, 4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_lease_table_frees_every_block_once_and_never_during_a_read(steps: list[tuple[str, int, int]]) -> None:
    leases = Leases(blocks_max=8, slots=3)
    granted: dict[str, TransferLease] = {}
    freed: set[str] = set()
    reading: list[TransferLease] = []

    def free(ended: list[TransferLease]) -> None:
        for lease in ended:
            assert lease.transfer_id not in freed, "freed twice"
            assert lease not in reading, "freed under a reader"
            freed.add(lease.transfer_id)

    for now, (what, which, count) in enumerate(steps):
        name = list(granted)[which % len(granted)] if granted else "no-adapter"
        if what == "grant":
            lease, ended = leases.grant(f"lease{now}", range(count), now + 5.0)
            free(ended)
            if lease is not None:
                granted[lease.transfer_id] = lease
        elif what == "pin":
            pinned = leases.pin(name)
            assert pinned is None or name not in freed
            reading += [pinned] if pinned is not None else []
        elif what == "unpin" and reading:
            lease = reading.pop()
            free(leases.unpin(lease))
        elif what == "release":
            free(leases.release(name)[1])
        elif what == "expire":
            free(leases.expire(now))
        elif what == "drop":
            free(leases.drop_oldest())
        elif what == "clear":
            free(leases.clear())
        leases.validate()
    while reading:
        lease = reading.pop()
        free(leases.unpin(lease))
    free(leases.clear())
    assert freed == granted.keys()
    assert leases.held == len(leases) == 0
