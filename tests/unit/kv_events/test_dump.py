"""A dump in pieces equals the dump made at once."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_events.dump import TIERS, KvDump
from dynamo.protocols.kv_events import KvEventData, NumberedKvEvent, Removed, Stored, StoredBlock, WorkerKvEvent

Tree = tuple[list[StoredBlock], list[int | None], list[int]]


def make_event(number: int, change: Stored | Removed, tier: str) -> WorkerKvEvent:
    data = KvEventData(stored=change) if isinstance(change, Stored) else KvEventData(removed=change)
    return WorkerKvEvent(1, tier, "worker", NumberedKvEvent(number, data, 0))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Return trees of blocks 1, 2, …, each with an earlier parent or none, in any order; only held blocks have
    children.
    """
    size = draw(st.integers(0, 30))
    parents = [draw(st.one_of(st.none(), st.integers(1, number - 1))) if number > 1 else None
               for number in range(1, size + 1)]  # fmt: skip
    tiers = [draw(st.integers(0 if number in parents else 1, 15)) for number in range(1, size + 1)]
    order = draw(st.permutations(range(size)))
    blocks = [StoredBlock(place + 1, place) for place in order]
    return blocks, [parents[place] for place in order], [tiers[place] for place in order]


@given(trees(), st.integers(1, 7))
def test_kv_dump_pieces_join_to_the_whole(tree: Tree, blocks: int) -> None:
    whole, pieces = KvDump(*tree, make_event), KvDump(*tree, make_event)
    rounds = 0
    while not pieces.is_complete:
        pieces.work(blocks)
        rounds += 1
        assert rounds <= (5 + len(TIERS)) * len(tree[0]) // blocks + 1
    assert pieces.events == whole.complete()
    assert [event.event.event_id for event in whole.events] == list(range(1, len(whole.events) + 1))


@given(trees())
def test_kv_dump_lists_every_block_after_its_parent_with_its_tier(tree: Tree) -> None:
    blocks, parents, tiers = tree
    held: dict[int, set[str]] = {block.block_hash: set() for block in blocks}
    before = dict(zip(held, parents, strict=True))
    order: list[int] = []
    for event in KvDump(*tree, make_event).complete():
        tier = event.storage_tier
        assert isinstance(event.event.data, KvEventData)
        if event.event.data.removed is not None:
            for key in event.event.data.removed.block_hashes:
                held[key].remove(tier)
            continue
        assert event.event.data.stored is not None
        order.append(TIERS.index(tier))
        parent = event.event.data.stored.parent_hash
        for block in event.event.data.stored.blocks:
            assert before[block.block_hash] == parent
            assert parent is None or held[parent]
            assert tier not in held[block.block_hash]
            held[block.block_hash].add(tier)
            parent = block.block_hash
    assert order == sorted(order)
    wanted = {block.block_hash: bits for block, bits in zip(blocks, tiers, strict=True)}
    assert held == {
        key: {name for number, name in enumerate(TIERS) if bits >> number & 1} for key, bits in wanted.items()
    }


@given(trees())
def test_kv_dump_of_device_blocks_depends_on_no_other_tier(tree: Tree) -> None:
    known: set[int] = set()
    for event in KvDump(*tree, make_event).complete():
        assert isinstance(event.event.data, KvEventData)
        if event.storage_tier != TIERS[0] or event.event.data.stored is None:
            continue
        parent = event.event.data.stored.parent_hash
        assert parent is None or parent in known
        known |= {block.block_hash for block in event.event.data.stored.blocks}
