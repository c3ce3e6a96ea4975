"""Invariants: checks of every simulated engine between two steps."""

from typing import TYPE_CHECKING, Any

from dynamo.mocker.simulation.sequence import State

if TYPE_CHECKING:
    from dynamo.mocker.simulation.rank_state import RankState


def check_invariants(sim: "RankState[Any]") -> None:
    """Raise `AssertionError` if blocks, tokens or requests are lost or counted twice."""
    sim.pool.validate()
    if sim.host is not None:
        sim.host.validate()
    _check_blocks(sim)
    _check_counts(sim)
    _check_waiting(sim)
    _check_decoding(sim)


def _check_blocks(sim: "RankState[Any]") -> None:
    holding = [*sim.decoding, *([sim.partial] if sim.partial else []), *sim.loading, *sim.loaded, *sim.kept]
    holders: dict[int, int] = {}
    for sequence in holding:
        for block_hash in sequence.hashes[: sequence.committed]:
            holders[block_hash] = holders.get(block_hash, 0) + 1
    assert holders == sim.pool.active, "the pool's holder counts differ from the sequences"
    assert sim.pool.private == sum(sequence.private for sequence in holding)
    assert len(sim.decoding) + (sim.partial is not None) <= sim.limits.max_num_seqs


def _check_counts(sim: "RankState[Any]") -> None:
    admitted = [*([sim.partial] if sim.partial else []), *sim.loading, *sim.loaded]
    queued = sum(sequence.length for sequence in sim.waiting) + sum(sequence.owed for sequence in admitted)
    assert sim.queued_tokens == queued
    assert sim.context_tokens == sum(sim.context_of(sequence) for sequence in sim.decoding)
    fresh, preempted, offsets = sim.tallies
    for tally, values in (
        (fresh, [sequence.length for sequence in sim.waiting if not sequence.generated]),
        (preempted, [sequence.length for sequence in sim.waiting if sequence.generated]),
        (offsets, [sim.context_of(sequence, 0) for sequence in sim.decoding]),
    ):
        assert (tally.count, tally.total) == (len(values), sum(values))
        assert tally.squares == sum(value * value for value in values)


def _check_waiting(sim: "RankState[Any]") -> None:
    for sequence in sim.waiting:
        assert sequence.state is State.WAITING
        assert sequence.committed == sequence.private == 0
    for sequence in (*sim.loading, *sim.loaded):
        assert sequence.state is State.LOADING
    for sequence in sim.kept:
        assert sequence.state is State.DONE


def _check_decoding(sim: "RankState[Any]") -> None:
    borders, endings = sim.expected
    assert sum(map(len, endings.values())) == len(sim.decoding)
    assert sum(map(len, borders.values())) == sum(one.border <= one.ending for one in sim.decoding)
    for sequence in sim.decoding:
        assert sequence.state is State.DECODING
        assert sequence in endings[sequence.ending]
        assert sequence.border > sequence.ending or sequence in borders[sequence.border]
        assert sequence.border >= sim.steps
        assert 0 <= sim.steps - sequence.birth < sequence.max_tokens
        assert sequence.committed + sequence.private == sim.blocks_held_by(sequence)
