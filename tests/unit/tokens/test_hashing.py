"""Block hashes: equal to the released 1.6.1's, and names of prefixes."""

import struct
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from dynamo.tokens.hashing import (
    SEED,
    block_hashes,
    next_sequence_hash,
    packed_block_hashes,
    packed_sequence_hashes,
    python_packed_block_hashes,
    python_packed_sequence_hashes,
    seed_of,
    sequence_hashes,
)

TEN = list(range(10))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize(
    ("tokens", "seed", "expected"),
    [
        (TEN, seed_of(), [9143094415614847814, 12124091508212882195]),
        (TEN, seed_of(lora_name="ada"), [725318272515358636, 9685660903882622065]),
        (TEN, seed_of(cache_salt="salt"), [5868227703205337350, 16843860999297827048]),
        ([2**32 - 1] * 4, seed_of("ada", "salt"), [947855743747181305]),
    ],
)
def test_block_hashes_equal_those_of_the_released_bindings(tokens: list[int], seed: int, expected: list[int]) -> None:
    # Printed by dynamo._core.compute_block_hash_for_seq(tokens, 4, lora_name=…, cache_namespace=…) of ai-dynamo 1.6.1.
    assert block_hashes(tokens, 4, seed) == expected


def test_empty_adapter_or_salt_equals_none() -> None:
    assert seed_of("", "") == SEED


def test_adapter_and_salt_change_the_block_hash() -> None:
    seeds = [seed_of(), seed_of("ada"), seed_of(None, "ada"), seed_of("ada", "ada")]
    assert len({block_hashes(TEN, 4, seed)[0] for seed in seeds}) == len(seeds)


@given(TOKENS, st.integers(1, 8))
def test_only_complete_blocks_have_a_hash(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert hashes == block_hashes(tokens[: len(hashes) * size], size)


@given(TOKENS, st.integers(1, 8))
def test_block_hash_depends_only_on_the_tokens_of_the_block(tokens: list[int], size: int) -> None:
    alone = [block_hashes(tokens[at : at + size], size) for at in range(0, len(tokens) - size + 1, size)]
    assert block_hashes(tokens, size) == [hashes[0] for hashes in alone]


def test_sequence_hash_chains_the_previous_hash_and_the_block() -> None:
    first, second = block_hashes(TEN, 4)
    assert sequence_hashes([first, second]) == [
        first,
        xxh3_64_intdigest(struct.pack("<QQ", first, second), 1337),
    ]
    assert sequence_hashes([]) == []


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_sequences_share_hashes_exactly_for_their_common_prefix(left: list[int], right: list[int], size: int) -> None:
    ours, theirs = (sequence_hashes(block_hashes(tokens, size)) for tokens in (left, right))
    for depth, (our, their) in enumerate(zip(ours, theirs, strict=False), start=1):
        assert (our == their) == (left[: depth * size] == right[: depth * size])


@given(TOKENS, st.integers(1, 4))
def test_block_by_block_hashing_equals_hashing_at_once(tokens: list[int], size: int) -> None:
    previous: int | None = None
    stepped = []
    for tokens_hash in block_hashes(tokens, size):
        previous = next_sequence_hash(previous, tokens_hash)
        stepped.append(previous)
    assert stepped == sequence_hashes(block_hashes(tokens, size))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20))
def test_packed_hashes_equal_unpacked_hashes(tokens: list[int], size: int) -> None:
    packed = packed_block_hashes(tokens, size, 7)
    assert struct.unpack(f">{len(packed) // 8}Q", packed) == tuple(block_hashes(tokens, size, 7))


hashers = pytest.mark.parametrize("hasher", [packed_block_hashes, python_packed_block_hashes])


@given(st.integers(1, 320), st.integers(0, 3), st.integers(0, 2**64 - 1), st.randoms(use_true_random=False))
def test_compiled_block_hashes_equal_those_of_python_for_every_block_length(size, blocks, seed, random) -> None:  # type: ignore[no-untyped-def]
    tokens = [random.getrandbits(32) for _ in range(size * blocks + random.randrange(size))]
    assert packed_block_hashes(tokens, size, seed) == python_packed_block_hashes(tokens, size, seed)
    assert packed_block_hashes(tuple(tokens), size) == packed_block_hashes(array("I", tokens), size)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_compiled_sequence_hashes_equal_those_of_python(hashes: list[int]) -> None:
    packed = struct.pack(f">{len(hashes)}Q", *hashes)
    assert packed_sequence_hashes(packed) == python_packed_sequence_hashes(packed)
    assert list(struct.unpack(f">{len(hashes)}Q", packed_sequence_hashes(packed))) == sequence_hashes(hashes)


@hashers
@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_token_beyond_32_bits_raises_overflow_error(hasher: Callable[..., bytes], token: int) -> None:
    with pytest.raises(OverflowError):
        hasher([1, token], 1)


@hashers
@pytest.mark.parametrize("token", [1.0, "1", None])
def test_token_that_is_not_an_integer_raises_type_error(hasher: Callable[..., bytes], token: object) -> None:
    with pytest.raises(TypeError):
        hasher([1, token], 1)


@hashers
def test_numpy_tokens_are_hashed_as_integers(hasher: Callable[..., bytes]) -> None:
    assert hasher(list(np.arange(8)), 4) == hasher(list(range(8)), 4)
