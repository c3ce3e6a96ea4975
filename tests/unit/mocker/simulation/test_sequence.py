"""A sequence computes its own hashes and its own end."""

from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.tokens.hashing import block_hashes, packed_hashes, sequence_hashes


def sequence(prompt: list[int], max_tokens: int = 5) -> SimulatedSequence[None]:
    return SimulatedSequence(None, prompt, max_tokens, 0.0, 0)


def test_hashes_are_independent_of_chunk_boundaries() -> None:
    tokens = list(range(12))
    one, many = sequence(tokens), sequence(tokens)
    one.extend_hashes(tokens, 4)
    for start in range(0, 12, 4):
        many.extend_hashes(tokens[start : start + 4], 4)
    assert one.hashes == many.hashes == sequence_hashes(block_hashes(tokens, 4))
    assert one.packed == many.packed == packed_hashes(block_hashes(tokens, 4))


def test_sequence_ends_in_the_step_of_its_last_token() -> None:
    decoding = sequence([1], max_tokens=5)
    decoding.birth = 10
    assert decoding.ending == 14


def test_sequence_length_includes_generated_tokens() -> None:
    waiting = sequence([1, 2, 3])
    waiting.generated = 2
    assert waiting.length == 5


def test_equal_requests_are_separate_sequences() -> None:
    assert sequence([1]) != sequence([1])
