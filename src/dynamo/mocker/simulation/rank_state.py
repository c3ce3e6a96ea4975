"""RankState: state of a rank of a simulated engine: queues, blocks and their totals."""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

from dynamo.core.tally import Tally
from dynamo.mocker.simulation.blocks import SimulatedBlockPool
from dynamo.mocker.simulation.host import HostTier
from dynamo.mocker.simulation.rules import RankLimits
from dynamo.mocker.simulation.sequence import Owner, SequenceState, SimulatedSequence
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.load import QueuedRequests, WorkerLoad
from dynamo.tokens.hashing import U64, packed_hashes


@dataclass(slots=True)
class RankState(Generic[Owner]):
    """The state of a rank; `Batching` contains the scheduling."""

    limits: RankLimits
    timing: StepTimes
    source: TokenSource
    dp_rank: int = 0
    pool: SimulatedBlockPool = field(init=False)
    waiting: deque[SimulatedSequence[Owner]] = field(init=False, default_factory=deque)
    partial: SimulatedSequence[Owner] | None = field(init=False, default=None)
    """The only partly computed prompt: the token budget can split only the last admitted one."""
    decoding: dict[SimulatedSequence[Owner], None] = field(init=False, default_factory=dict)
    """Decoding sequences, oldest first."""
    loading: dict[SimulatedSequence[Owner], None] = field(init=False, default_factory=dict)
    """Sequences whose blocks are being copied."""
    loaded: deque[SimulatedSequence[Owner]] = field(init=False, default_factory=deque)
    """Sequences whose blocks have arrived and that are not scheduled yet."""
    kept: dict[SimulatedSequence[Owner], None] = field(init=False, default_factory=dict)
    """Finished sequences whose blocks are held for another worker."""
    host: HostTier | None = field(init=False, default=None)
    now_ms: float = field(init=False, default=0.0)
    unnamed: Iterator[int] = field(init=False)
    """Hashes of answers' blocks whose tokens are not used."""
    reports_answers: bool = field(init=False, default=True)
    """Whether these blocks are reported as stored and removed. Set it before the first request; required with a host tier."""
    tokens_of: dict[int, list[int]] | None = field(init=False, default=None)
    """Tokens of recently stored blocks by hash; None if unused. The consumer clears it."""
    is_observed: bool = field(init=False, default=True)
    """Whether the results of steps have tokens and the rank's load, which a replay does not use."""
    steps: int = field(init=False, default=0)
    preemptions: int = field(init=False, default=0)
    admitted_tokens: int = field(init=False, default=0)
    """Tokens of all admissions except remote ones, as upstream; a sequence counts once per admission."""
    reused_tokens: int = field(init=False, default=0)
    """Tokens of these admissions that were cached."""
    _queued_tokens: int = field(init=False, default=0)
    _context_tokens: int = field(init=False, default=0)
    _queued: Tally = field(init=False, default_factory=Tally)
    """Prompt lengths of sequences that wait for their first token."""
    _preempted: Tally = field(init=False, default_factory=Tally)
    """Lengths of preempted sequences that already had their first token."""
    _offsets: Tally = field(init=False, default_factory=Tally)
    """Context lengths of decoding sequences minus the step number, which are constant during decoding."""
    _borders: dict[int, dict[SimulatedSequence[Owner], None]] = field(init=False, default_factory=dict)
    """Step → sequences that need another block in it, in order."""
    _endings: dict[int, dict[SimulatedSequence[Owner], None]] = field(init=False, default_factory=dict)
    """Step → sequences whose last token it generates."""
    _lineup: list[SimulatedSequence[Owner]] = field(init=False, default_factory=list)
    _phases: list[int] = field(init=False, default_factory=list)
    _changed: bool = field(init=False, default=False)
    _reservable: int = field(init=False, default=0)
    """Number of remote prompts for which the current step may still reserve blocks."""
    _is_steady: bool = field(init=False, default=False)
    """Whether the last step computed no prompt, ended no sequence, and no request arrived since."""

    def __post_init__(self) -> None:
        self.pool = SimulatedBlockPool(self.limits.num_blocks, self.limits.eviction)
        self.unnamed = itertools.count(self.source.first_hash)
        if self.limits.host is not None and self.limits.enable_prefix_caching:
            self.host = HostTier(self.limits.host)

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks for `tokens` tokens."""
        return -(-tokens // self.limits.block_tokens)

    @property
    def is_idle(self) -> bool:
        """Return whether a step would have no effect."""
        if self.decoding or self.partial is not None or self.waiting or self.loaded:
            return False
        return not self.has_timed_arrivals

    @property
    def has_timed_arrivals(self) -> bool:
        """Return whether blocks that are being copied arrive at a known time."""
        if self.host is not None and self.host.next_ms < math.inf:
            return True
        return bool(self.loading) and any(sequence.ready_ms < math.inf for sequence in self.loading)

    @property
    def _running(self) -> int:
        return len(self.decoding) + (self.partial is not None)

    @property
    def queued_tokens(self) -> int:
        """Return the tokens to be computed before the next tokens of the waiting sequences."""
        return self._queued_tokens

    @property
    def tallies(self) -> tuple[Tally, Tally, Tally]:
        """Return the tallies of waiting, preempted and decoding sequences."""
        return self._queued, self._preempted, self._offsets

    @property
    def expected(
        self,
    ) -> tuple[dict[int, dict[SimulatedSequence[Owner], None]], dict[int, dict[SimulatedSequence[Owner], None]]]:
        """Return, by step, the sequences that need a block and the sequences that end."""
        return self._borders, self._endings

    @property
    def context_tokens(self) -> int:
        """Return the cached tokens of decoding sequences."""
        return self._context_tokens

    def blocks_held_by(self, sequence: SimulatedSequence[Owner]) -> int:
        """Return the number of blocks held by a decoding sequence."""
        return self.blocks_of(self.context_of(sequence))

    def context_of(self, sequence: SimulatedSequence[Owner], step: int | None = None) -> int:
        """Return the cached tokens of a decoding sequence at the start of `step` (None: the next step)."""
        return len(sequence.prompt) + (self.steps if step is None else step) - sequence.birth - 1

    def generated_tokens(self, sequence: SimulatedSequence[Owner]) -> int:
        """Return the number of tokens generated for a sequence so far."""
        return self.steps - sequence.birth if sequence.state is SequenceState.DECODING else sequence.generated

    def load(self) -> WorkerLoad:
        """Return the load of the rank."""
        used = self.pool.used
        return WorkerLoad(
            dp_rank=self.dp_rank,
            active_decode_blocks=used,
            active_prefill_tokens=self._queued_tokens,
            kv_used_blocks=used,
            kv_total_blocks=self.limits.num_blocks,
            running_requests=len(self.decoding) + (self.partial is not None),
            waiting_requests=len(self.waiting) + len(self.loading) + len(self.loaded),
        )

    def _queue_metrics(self) -> QueuedRequests:
        queued, preempted = self._queued, self._preempted
        if not queued.count and not preempted.count:
            return QueuedRequests()
        return QueuedRequests(
            num_prefill_requests=queued.count,
            sum_prefill_tokens=queued.total,
            var_prefill_length=queued.variance,
            num_decode_requests=preempted.count,
            sum_decode_kv_tokens=preempted.total,
            var_decode_kv_tokens=preempted.variance,
        )

    def validate(self) -> None:
        """Raise `AssertionError` if an invariant between two steps is violated."""
        self.pool.validate()
        if self.host is not None:
            self.host.validate()
        _check_blocks(self)
        _check_counts(self)
        _check_waiting(self)
        _check_decoding(self)

    # Entering and leaving queues.

    def _enqueue(self, sequence: SimulatedSequence[Owner], *, first: bool = False) -> None:
        self._is_steady = False
        sequence.state = SequenceState.WAITING
        self._queued_tokens += sequence.length
        self._queue_of(sequence).add(sequence.length)
        if first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def _queue_of(self, sequence: SimulatedSequence[Owner]) -> Tally:
        return self._preempted if sequence.generated else self._queued

    def _expect_border(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        sequence.border = step
        if step <= sequence.ending:
            self._borders.setdefault(step, {})[sequence] = None

    def _expect_nothing(self, sequence: SimulatedSequence[Owner]) -> None:
        """Remove a sequence from the schedules of later steps."""
        for steps, step in ((self._borders, sequence.border), (self._endings, sequence.ending)):
            bucket = steps.get(step)
            if bucket is not None:
                bucket.pop(sequence, None)
                if not bucket:
                    del steps[step]

    def _leave_loading(self, sequence: SimulatedSequence[Owner]) -> None:
        if sequence in self.loading:
            del self.loading[sequence]
        else:
            self.loaded.remove(sequence)
        self._queued_tokens -= sequence.owed
        self._release(sequence)

    def _leave_prefill(self, sequence: SimulatedSequence[Owner]) -> None:
        self._queued_tokens -= sequence.length - sequence.computed
        self.partial = None
        self._release(sequence)

    def _leave_decode(self, sequence: SimulatedSequence[Owner], step: int | None = None) -> None:
        self._expect_nothing(sequence)
        self._context_tokens -= self.context_of(sequence, step)
        self._offsets.remove(self.context_of(sequence, 0))
        del self.decoding[sequence]
        self._changed = True
        self._release(sequence)

    # Blocks.

    def _hits(self, sequence: SimulatedSequence[Owner]) -> int:
        """Return the number of cached leading blocks, except one with the last token, which is always computed."""
        if not self.limits.enable_prefix_caching:
            return 0
        self._extend_hashes(sequence, sequence.length // self.limits.block_tokens)
        return self.pool.match(sequence.hashes[: (sequence.length - 1) // self.limits.block_tokens])

    def _host_hits(self, sequence: SimulatedSequence[Owner], hits: int) -> int:
        """Return the number of following blocks that the host tier holds."""
        if self.host is None or sequence.is_remote:
            return 0
        self.host.settle(self.now_ms)
        return self.host.match(sequence.hashes[hits : (sequence.length - 1) // self.limits.block_tokens])

    def _settle(self, sequence: SimulatedSequence[Owner], tokens: int) -> None:
        """Commit the blocks that `tokens` computed tokens complete."""
        complete = tokens // self.limits.block_tokens
        done = sequence.committed
        if complete <= done or not self.limits.enable_prefix_caching:
            return
        self._extend_hashes(sequence, complete)
        parent = sequence.hashes[done - 1] if done else None
        self.pool.commit(parent, sequence.hashes[done:complete], sequence.packed[8 * done : 8 * complete])
        if self.tokens_of is not None:
            for index in range(done, complete):
                self.tokens_of[sequence.hashes[index]] = self._tokens(sequence, index, index + 1)
        sequence.committed = complete
        sequence.private -= complete - done

    def _extend_hashes(self, sequence: SimulatedSequence[Owner], blocks: int) -> None:
        """Hash further blocks of the prompt and the answer, up to `blocks`."""
        known = len(sequence.hashes)
        if blocks <= known:
            return
        end = blocks
        if isinstance(sequence.prompt, range):  # No token of the answer is used: a unique hash identifies its blocks.
            end = max(known, min(blocks, len(sequence.prompt) // self.limits.block_tokens))
        if end > known:
            sequence.extend_hashes(self._tokens(sequence, known, end), self.limits.block_tokens)
        if blocks > end and self.reports_answers:
            sequence.extend_packed(packed_hashes([next(self.unnamed) & U64 for _ in range(end, blocks)]))
        elif blocks > end:
            sequence.hashes += [-1 - next(self.unnamed) for _ in range(end, blocks)]

    def _tokens(self, sequence: SimulatedSequence[Owner], first: int, end: int) -> list[int]:
        """Return the tokens of a range of blocks."""
        start, stop = first * self.limits.block_tokens, end * self.limits.block_tokens
        prompt, generated_tokens = len(sequence.prompt), sequence.offset - len(sequence.prompt)
        tokens = list(sequence.prompt[start:stop])
        if stop > prompt:
            answer = self.source.slice(generated_tokens + max(start, prompt), generated_tokens + stop)
            if sequence.script is not None:
                places = range(max(start - prompt, 0), stop - prompt)
                answer = [sequence.script.get(place, token) for place, token in zip(places, answer, strict=True)]
            tokens = tokens + answer
        return tokens

    def _release(self, sequence: SimulatedSequence[Owner]) -> None:
        self.pool.release(sequence.hashes[: sequence.committed], sequence.private)
        sequence.committed = sequence.private = 0


def _check_blocks(sim: RankState[Any]) -> None:
    holding = [*sim.decoding, *([sim.partial] if sim.partial else []), *sim.loading, *sim.loaded, *sim.kept]
    holders: dict[int, int] = {}
    for sequence in holding:
        for block_hash in sequence.hashes[: sequence.committed]:
            holders[block_hash] = holders.get(block_hash, 0) + 1
    assert holders == sim.pool.active, "the pool's holder counts differ from the sequences"
    assert sim.pool.private == sum(sequence.private for sequence in holding)
    assert len(sim.decoding) + (sim.partial is not None) <= sim.limits.max_num_seqs


def _check_counts(sim: RankState[Any]) -> None:
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


def _check_waiting(sim: RankState[Any]) -> None:
    for sequence in sim.waiting:
        assert sequence.state is SequenceState.WAITING
        assert sequence.committed == sequence.private == 0
    for sequence in (*sim.loading, *sim.loaded):
        assert sequence.state is SequenceState.LOADING
    for sequence in sim.kept:
        assert sequence.state is SequenceState.DONE


def _check_decoding(sim: RankState[Any]) -> None:
    borders, endings = sim.expected
    assert sum(map(len, endings.values())) == len(sim.decoding)
    assert sum(map(len, borders.values())) == sum(one.border <= one.ending for one in sim.decoding)
    for sequence in sim.decoding:
        assert sequence.state is SequenceState.DECODING
        assert sequence in endings[sequence.ending]
        assert sequence.border > sequence.ending or sequence in borders[sequence.border]
        assert sequence.border >= sim.steps
        assert 0 <= sim.steps - sequence.birth < sequence.max_tokens
        assert sequence.committed + sequence.private == sim.blocks_held_by(sequence)
