from dynamo.cpu.sequence import TokenSequence
from dynamo.tokens.hashing import block_hashes, seed_of, sequence_hashes


def test_at_least_one_token_is_left_to_compute() -> None:
    assert len(TokenSequence(range(8), 4).reusable_hashes()) == 1
    assert len(TokenSequence(range(9), 4).reusable_hashes()) == 2
    assert TokenSequence(range(4), 4).reusable_hashes() == []


def test_hashes_are_those_of_the_whole_system() -> None:
    tokens = list(range(12))
    seed = seed_of(cache_salt="tenant")
    sequence = TokenSequence(tokens, 4, hash_seed=seed)
    assert sequence.reusable_hashes() == sequence_hashes(block_hashes(tokens, 4, seed))[:2]


def test_blocks_that_adjoin_are_one_run() -> None:
    sequence = TokenSequence(range(20), 4)
    sequence.hold([3, 4, 9])
    sequence.hold([10, 2])
    assert sequence.runs == [(12, 20), (36, 44), (8, 12)]
    assert sequence.visible_runs(18) == [(12, 20), (36, 44), (8, 10)]
    assert sequence.visible_runs(20)[-1] == (8, 12)
    sequence.validate()


def test_a_block_is_complete_once_all_its_tokens_are_computed() -> None:
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


def test_cached_blocks_are_computed_and_need_not_be_stored() -> None:
    sequence = TokenSequence(range(10), 4)
    sequence.hold([1, 2], is_cached=True)
    assert (sequence.computed, sequence.pending, sequence.newly_complete()) == (8, 2, (None, []))


def test_a_dropped_sequence_begins_again() -> None:
    sequence = TokenSequence(range(10), 4)
    sequence.hold([1, 2], is_cached=True)
    assert sequence.drop() == [1, 2]
    assert (sequence.computed, sequence.blocks, sequence.runs, sequence.pending) == (0, [], [], 10)


def test_a_follower_waits_for_the_prompt_that_it_shares() -> None:
    leader = TokenSequence(range(10), 4)
    follower = TokenSequence(range(10), 4, leader=leader)
    assert not follower.is_ready
    leader.computed = 10
    assert follower.is_ready
    leader.computed, leader.is_finished = 0, True
    assert follower.is_ready
