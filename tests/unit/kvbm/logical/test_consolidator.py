from dynamo.kvbm.logical.blocks import BlockIdentity, Tier
from dynamo.kvbm.logical.consolidator import Consolidator
from dynamo.kvbm.logical.pool import Change
from dynamo.protocols.kv_events import Cleared, Removed, Stored, StoredBlock


def stored(key: int) -> Change:
    return Change(BlockIdentity(key, key + 1000, key - 1 if key > 1 else None), is_stored=True)


def removed(key: int) -> Change:
    return Change(BlockIdentity(key, key + 1000, key - 1 if key > 1 else None), is_stored=False)


def event(*keys: int) -> Stored:
    return Stored(keys[0] - 1 or None, None, [StoredBlock(key, key + 1000) for key in keys])


def test_consolidator_merges_consecutive_blocks_into_one_event() -> None:
    reported = list(Consolidator().lower(Tier.HOST, [stored(1), stored(2), removed(1), removed(2), stored(1)]))
    assert reported == [(event(1, 2), "host_pinned"), (Removed([1, 2]), "host_pinned"), (event(1), "host_pinned")]


def test_consolidator_block_may_have_a_parent_in_another_tier() -> None:
    story = Consolidator()
    assert list(story.device([event(1)])) == [(event(1), "device")]
    assert list(story.lower(Tier.DISK, [stored(2)])) == [(event(2), "disk")]


def test_consolidator_skips_a_block_without_parent() -> None:
    story = Consolidator()
    assert list(story.lower(Tier.HOST, [stored(2), removed(2)])) == []
    list(story.device([event(1), Removed([1])]))
    assert list(story.lower(Tier.HOST, [stored(2)])) == []


def test_consolidator_clears_all_tiers_together() -> None:
    story = Consolidator()
    list(story.lower(Tier.HOST, [stored(1)]))
    assert list(story.device([Cleared()])) == [(Cleared(), "device")]
    assert list(story.lower(Tier.HOST, [removed(1)])) == []
