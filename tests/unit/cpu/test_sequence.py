from dynamo.cpu.sequence import TokenSequence
from dynamo.tokens.hashing import block_hashes, seed_of, sequence_hashes


def test_sequence_leaves_at_least_one_token_to_compute() -> None:
    assert len(TokenSequence(range(8), 4).reusable_hashes()) == 1
    assert len(TokenSequence(range(9), 4).reusable_hashes()) == 2
    assert TokenSequence(range(4), 4).reusable_hashes() == []


def test_sequence_hashes_equal_those_of_routers() -> None:
    tokens = list(range(12))
    seed = seed_of(cache_salt="tenant")
    sequence = TokenSequence(tokens, 4, hash_seed=seed)
    assert sequence.reusable_hashes() == sequence_hashes(block_hashes(tokens, 4, seed))[:2]


def test_sequence_adjacent_blocks_are_one_run() -> None:
    sequence = TokenSequence(range(20), 4)
    sequence.hold([3, 4, 9])
    sequence.hold([10, 2])
    assert sequence.runs == [(12, 20), (36, 44), (8, 12)]
    assert sequence.visible_runs(18) == [(12, 20), (36, 44), (8, 10)]
    assert sequence.visible_runs(20)[-1] == (8, 12)
    sequence.validate()


def test_sequence_block_is_complete_when_all_tokens_are_computed() -> None:
    sequence = TokenSequence(range(6), 4)
    sequence.hold([5, 6])
    sequence.computed = 3
    assert sequence.newly_complete() == (None, [])
    sequence.computed = 6
    parent, contents = sequence.newly_complete()
    assert (parent, [content.block for content in contents]) == (None, [5])
    sequence.tokens += [7, 8]
    sequence.computed = 8
    parent, contents = sequence.newly_complete()
    assert [content.block for content in contents] == [6]
    assert [parent, contents[0].sequence_hash] == sequence_hashes(block_hashes(sequence.tokens, 4))


def test_sequence_cached_blocks_are_not_stored_again() -> None:
    sequence = TokenSequence(range(10), 4)
    sequence.hold([1, 2], is_cached=True)
    assert (sequence.computed, sequence.pending, sequence.newly_complete()) == (8, 2, (None, []))


def test_sequence_restarts_after_preemption() -> None:
    sequence = TokenSequence(range(10), 4)
    sequence.hold([1, 2], is_cached=True)
    assert sequence.drop() == [1, 2]
    assert (sequence.computed, sequence.blocks, sequence.runs, sequence.pending) == (0, [], [], 10)


def test_sequence_follower_waits_for_the_shared_prompt() -> None:
    leader = TokenSequence(range(10), 4)
    follower = TokenSequence(range(10), 4, leader=leader)
    assert not follower.is_ready
    leader.computed = 10
    assert follower.is_ready
    leader.computed, leader.is_finished = 0, True
    assert follower.is_ready
