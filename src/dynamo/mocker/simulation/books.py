"""Books: what one rank of a simulated engine holds and owes: its queues, its blocks, and what they add up to."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic

from dynamo.core.tally import Tally
from dynamo.mocker.simulation.audit import audit
from dynamo.mocker.simulation.blocks import BlockPool
from dynamo.mocker.simulation.host import HostTier
from dynamo.mocker.simulation.rules import Limits
from dynamo.mocker.simulation.sequence import Owner, Sequence, State
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.load import QueuedRequests, WorkerLoad


@dataclass(slots=True)
class Books(Generic[Owner]):
    """The state of a rank. What it does with it is `Batching`'s."""

    limits: Limits
    timing: StepTimes
    source: TokenSource
    dp_rank: int = 0
    pool: BlockPool = field(init=False)
    waiting: deque[Sequence[Owner]] = field(init=False, default_factory=deque)
    partial: Sequence[Owner] | None = field(init=False, default=None)
    """The one prompt that is partly computed: only the last one admitted can be cut off by the budget."""
    decoding: dict[Sequence[Owner], None] = field(init=False, default_factory=dict)
    """Oldest first."""
    loading: dict[Sequence[Owner], None] = field(init=False, default_factory=dict)
    """Whose blocks are on their way …"""
    loaded: deque[Sequence[Owner]] = field(init=False, default_factory=deque)
    """… and whose are there, but who are not running yet."""
    kept: dict[Sequence[Owner], None] = field(init=False, default_factory=dict)
    """Whose blocks are held for somebody else, though they are done."""
    host: HostTier | None = field(init=False, default=None)
    now_ms: float = field(init=False, default=0.0)
    tokens_of: dict[int, list[int]] | None = field(init=False, default=None)
    """The tokens of blocks that were stored lately, where somebody wants to know them; for that one to empty."""
    steps: int = field(init=False, default=0)
    preemptions: int = field(init=False, default=0)
    admitted_tokens: int = field(init=False, default=0)
    """Tokens of all sequences that were admitted, once for each time …"""
    reused_tokens: int = field(init=False, default=0)
    """… and how many of them the cache held."""
    _queued_tokens: int = field(init=False, default=0)
    _context_tokens: int = field(init=False, default=0)
    _queued: Tally = field(init=False, default_factory=Tally)
    """The lengths of those who wait for their first token …"""
    _preempted: Tally = field(init=False, default_factory=Tally)
    """… and of those who had theirs."""
    _offsets: Tally = field(init=False, default_factory=Tally)
    """What each decoding sequence's context is beyond the step's number: it stays while the context grows."""
    _borders: dict[int, dict[Sequence[Owner], None]] = field(init=False, default_factory=dict)
    """Step → who needs another block in it, in order."""
    _endings: dict[int, dict[Sequence[Owner], None]] = field(init=False, default_factory=dict)
    """Step → for whom it brings the last token."""
    _lineup: list[Sequence[Owner]] = field(init=False, default_factory=list)
    _phases: list[int] = field(init=False, default_factory=list)
    _changed: bool = field(init=False, default=False)
    _is_steady: bool = field(init=False, default=False)
    """Whether the last step computed no prompt and ended nothing, and nobody came since: who waits goes on waiting."""

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.limits.num_blocks, self.limits.eviction)
        if self.limits.host is not None and self.limits.enable_prefix_caching:
            self.host = HostTier(self.limits.host)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.limits.block_tokens)

    @property
    def is_idle(self) -> bool:
        """True when a step would do nothing."""
        if self.decoding or self.partial is not None or self.waiting or self.loaded:
            return False
        if self.host is not None and self.host.next_ms < math.inf:
            return False
        return not self.loading or all(sequence.ready_ms == math.inf for sequence in self.loading)

    @property
    def _running(self) -> int:
        return len(self.decoding) + (self.partial is not None)

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait to be computed before somebody's next token."""
        return self._queued_tokens

    @property
    def tallies(self) -> tuple[Tally, Tally, Tally]:
        """Of who waits for a first token, of who was preempted, and of the contexts of those who decode."""
        return self._queued, self._preempted, self._offsets

    @property
    def expected(self) -> tuple[dict[int, dict[Sequence[Owner], None]], dict[int, dict[Sequence[Owner], None]]]:
        """By step: who needs a block in it, and for whom it is the last."""
        return self._borders, self._endings

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache of those who decode."""
        return self._context_tokens

    def blocks_held_by(self, sequence: Sequence[Owner]) -> int:
        """How many blocks somebody holds who decodes."""
        return self.blocks_of(self.context_of(sequence))

    def context_of(self, sequence: Sequence[Owner], step: int | None = None) -> int:
        """Tokens of a decoding sequence that are in the cache when the step (None: the next one) begins."""
        return len(sequence.prompt) + (self.steps if step is None else step) - sequence.birth - 1

    def said(self, sequence: Sequence[Owner]) -> int:
        """How many tokens a sequence was given by the steps so far."""
        return self.steps - sequence.birth if sequence.state is State.DECODING else sequence.generated

    def load(self) -> WorkerLoad:
        """How busy the rank is."""
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
        return QueuedRequests(
            num_prefill_requests=queued.count,
            sum_prefill_tokens=queued.total,
            var_prefill_length=queued.variance,
            num_decode_requests=preempted.count,
            sum_decode_kv_tokens=preempted.total,
            var_decode_kv_tokens=preempted.variance,
        )

    def validate(self) -> None:
        """Checks what must always hold between two steps."""
        audit(self)

    # Who comes and goes.

    def _enqueue(self, sequence: Sequence[Owner], *, first: bool = False) -> None:
        self._is_steady = False
        sequence.state = State.WAITING
        self._queued_tokens += sequence.length
        self._queue_of(sequence).add(sequence.length)
        if first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def _queue_of(self, sequence: Sequence[Owner]) -> Tally:
        return self._preempted if sequence.generated else self._queued

    def _expect_border(self, sequence: Sequence[Owner], step: int) -> None:
        sequence.border = step
        if step <= sequence.ending:
            self._borders.setdefault(step, {})[sequence] = None

    def _expect_nothing(self, sequence: Sequence[Owner]) -> None:
        """Takes it off the lists of coming steps, so that they hold nobody who left."""
        for steps, step in ((self._borders, sequence.border), (self._endings, sequence.ending)):
            bucket = steps.get(step)
            if bucket is not None:
                bucket.pop(sequence, None)
                if not bucket:
                    del steps[step]

    def _leave_loading(self, sequence: Sequence[Owner]) -> None:
        if sequence in self.loading:
            del self.loading[sequence]
        else:
            self.loaded.remove(sequence)
        self._queued_tokens -= sequence.owed
        self._release(sequence)

    def _leave_prefill(self, sequence: Sequence[Owner]) -> None:
        self._queued_tokens -= sequence.length - sequence.computed
        self.partial = None
        self._release(sequence)

    def _leave_decode(self, sequence: Sequence[Owner], step: int | None = None) -> None:
        self._expect_nothing(sequence)
        self._context_tokens -= self.context_of(sequence, step)
        self._offsets.remove(self.context_of(sequence, 0))
        del self.decoding[sequence]
        self._changed = True
        self._release(sequence)

    # Blocks.

    def _hits(self, sequence: Sequence[Owner]) -> int:
        """Leading blocks that need not be computed; the last token always is, for it yields the next one."""
        if not self.limits.enable_prefix_caching:
            return 0
        self._extend_hashes(sequence, sequence.length // self.limits.block_tokens)
        return self.pool.match(sequence.hashes[: (sequence.length - 1) // self.limits.block_tokens])

    def _host_hits(self, sequence: Sequence[Owner], hits: int) -> int:
        """How many blocks after those the host's tier has."""
        if self.host is None or sequence.is_remote:
            return 0
        self.host.settle(self.now_ms)
        return self.host.match(sequence.hashes[hits : (sequence.length - 1) // self.limits.block_tokens])

    def _settle(self, sequence: Sequence[Owner], tokens: int) -> None:
        """Commits the blocks that these many computed tokens complete."""
        complete = tokens // self.limits.block_tokens
        done = sequence.committed
        if complete <= done or not self.limits.enable_prefix_caching:
            return
        self._extend_hashes(sequence, complete)
        parent = sequence.hashes[done - 1] if done else None
        self.pool.commit(parent, sequence.hashes[done:complete], sequence.tokens_hashes[done:complete])
        if self.tokens_of is not None:
            for index in range(done, complete):
                self.tokens_of[sequence.hashes[index]] = self._tokens(sequence, index, index + 1)
        sequence.committed = complete
        sequence.private -= complete - done

    def _extend_hashes(self, sequence: Sequence[Owner], blocks: int) -> None:
        """Hashes blocks of the prompt and, past its end, of the answer."""
        known = len(sequence.hashes)
        if blocks > known:
            sequence.extend_hashes(self._tokens(sequence, known, blocks), self.limits.block_tokens)

    def _tokens(self, sequence: Sequence[Owner], first: int, end: int) -> list[int]:
        """The tokens of some of its blocks."""
        start, stop = first * self.limits.block_tokens, end * self.limits.block_tokens
        prompt, said = len(sequence.prompt), sequence.offset - len(sequence.prompt)
        tokens = list(sequence.prompt[start:stop])
        if stop > prompt:
            tokens = tokens + self.source.slice(said + max(start, prompt), said + stop)
        return tokens

    def _release(self, sequence: Sequence[Owner]) -> None:
        self.pool.release(sequence.hashes[: sequence.committed], sequence.private)
        sequence.committed = sequence.private = 0
