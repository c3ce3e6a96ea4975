"""Batching: continuous batching, step by step, in the time it is given: what the engines' schedulers share.

    step(now) ─▶ every running sequence gets the block its next token needs,
                 prompts take what is left of the token budget, oldest first,
                 and the result says how long all this takes and who gets which token at its end.

A token costs nothing here: whoever decodes advances by one per step, so the step number stands for everybody's
count, and a sequence is touched only in the steps in which it needs a block or ends (`_borders`, `_endings`).

A sequence whose blocks come from elsewhere, out of the host's memory or from the worker that computes its prompt, holds
its room while it waits for them (`loading`), and is let in when they are there (`loaded`).
"""

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
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.load import ForwardPass, QueuedRequests, ScheduledRequests, WorkerLoad
from dynamo.tokens.hashing import SEED

PAUSE_MS = 1e-3  # No pause is shorter: one that is lost in rounding would be made again for ever.
IDLE_STEP_MS = 1.0  # How long a step takes that finds nothing to compute and somebody who waits.
WATERMARK = 0.01  # Of the blocks: kept free when a prompt is admitted, so that running sequences can grow.


@dataclass(slots=True)
class Batching(Generic[Owner]):
    """One rank of an engine. A sequence must be able to fit: see `blocks_of`."""

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

    @property
    def is_idle(self) -> bool:
        """True when a step would do nothing."""
        if self.decoding or self.partial is not None or self.waiting or self.loaded:
            return False
        if self.host is not None and self.host.next_ms < math.inf:
            return False
        return not self.loading or all(sequence.ready_ms == math.inf for sequence in self.loading)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.limits.block_tokens)

    def submit(
        self,
        owner: Owner,
        prompt: list[int] | range,
        max_tokens: int,
        now_ms: float,
        hash_seed: int = SEED,
        named: tuple[list[int], list[int]] | None = None,
        *,
        is_remote: bool = False,
        stays: bool = False,
    ) -> Sequence[Owner]:
        """Puts a request at the end of the waiting queue.

        `named`: tokens hashes and sequence hashes of the prompt's first blocks, where they are known already.
        `is_remote`: its prompt is computed elsewhere: it holds its room until `arrive` says when the blocks are there.
        `stays`: its blocks are held after its end, until `let_go`.
        """
        assert prompt, "a prompt has at least one token"
        assert max_tokens > 0, "an answer has at least one token"
        assert self.blocks_of(len(prompt) + max_tokens - 1) <= self.limits.num_blocks, "it can never fit"
        sequence = Sequence(owner, prompt, max_tokens, now_ms, self.source.offset(), hash_seed)
        sequence.is_remote, sequence.stays = is_remote, stays
        sequence.ready_ms = math.inf if is_remote else 0.0
        if named is not None:
            sequence.tokens_hashes, sequence.hashes = named
        self._enqueue(sequence)
        return sequence

    def cancel(self, sequence: Sequence[Owner]) -> None:
        """Drops a request; one that is done already stays done."""
        self._is_steady = False
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            self._queue_of(sequence).remove(sequence.length)
            self._queued_tokens -= sequence.length
        elif sequence.state is State.PREFILLING:
            self._leave_prefill(sequence)
        elif sequence.state is State.DECODING:
            self._leave_decode(sequence)
        elif sequence.state is State.LOADING:
            self._leave_loading(sequence)
        sequence.state = State.DONE

    def arrive(self, sequence: Sequence[Owner], ready_ms: float) -> None:
        """The blocks of a remote prompt are here from then on; told before it holds its room, too."""
        assert sequence.is_remote, "its prompt is computed here"
        self._is_steady = False
        sequence.ready_ms = ready_ms

    def let_go(self, sequence: Sequence[Owner]) -> None:
        """Nobody needs the blocks of a sequence any more that stays."""
        sequence.stays = False
        if sequence in self.kept:
            self._is_steady = False
            del self.kept[sequence]
            self._release(sequence)

    def step(self, now_ms: float) -> StepResult[Owner]:
        """One forward pass that begins now."""
        self.now_ms = now_ms
        step, self.steps = self.steps, self.steps + 1
        prefilled = self._let_in(step)
        self._grow(step)
        scheduled = self._scheduled_decodes()
        finished = self._end(step)
        budget = self.limits.max_num_batched_tokens - len(self.decoding) - len(finished)
        complete = self._prefill(budget, len(finished), scheduled)
        duration_ms = self._duration_ms(scheduled)
        sequences, tokens = self._decode(step)
        started = self._begin_decoding(complete, step + 1, finished)
        if started:
            sequences = sequences + started
            tokens = tokens + self._first_tokens(started)
        return self._result(duration_ms, sequences, tokens, finished, prefilled + complete, scheduled)

    def _scheduled_decodes(self) -> ScheduledRequests:
        return ScheduledRequests(
            num_decode_requests=len(self.decoding),
            sum_decode_kv_tokens=self._context_tokens + len(self.decoding),
            var_decode_kv_tokens=self._offsets.variance,
        )

    def _duration_ms(self, scheduled: ScheduledRequests) -> float:
        """How long a step takes that computes this; who finds nothing to compute looks again a little later."""
        capacity_tokens = self.limits.num_blocks * self.limits.block_tokens
        new_tokens, decodes = scheduled.sum_prefill_tokens, scheduled.num_decode_requests
        if not new_tokens and not decodes:
            ready_ms = min((sequence.ready_ms for sequence in self.loading), default=math.inf)
            if self.host is not None:
                ready_ms = min(ready_ms, self.host.next_ms)
            return min(max(ready_ms - self.now_ms, PAUSE_MS), IDLE_STEP_MS)
        decode_ms = self.timing.decode_ms(scheduled.sum_decode_kv_tokens, capacity_tokens, decodes)
        return self.timing.prefill_ms(new_tokens) + decode_ms

    def _first_tokens(self, started: list[Sequence[Owner]]) -> list[int]:
        ids, mask = self.source.ids, self.source.mask
        return [ids[(sequence.offset + sequence.generated - 1) & mask] for sequence in started]

    def _result(
        self,
        duration_ms: float,
        sequences: list[Sequence[Owner]],
        tokens: list[int],
        finished: list[Sequence[Owner]],
        prefilled: list[Sequence[Owner]],
        scheduled: ScheduledRequests,
    ) -> StepResult[Owner]:
        """The books are closed: what the world is to hear when the step is over."""
        end_ms = self.now_ms + duration_ms
        for sequence in prefilled:
            if sequence.first_token_ms < 0:
                sequence.first_token_ms = end_ms
        for sequence in finished:
            self._finish(sequence, end_ms)
        self._is_steady = not (scheduled.sum_prefill_tokens or finished or self.loading or self.loaded)
        passed = ForwardPass(duration_ms / 1000, scheduled, self._queue_metrics())
        events = self.pool.events()
        result = StepResult(duration_ms, sequences, tokens, finished, prefilled, events, self.load(), passed)
        if self.host is not None:
            self.host.offload(events, end_ms)
            self.host.settle(end_ms)
            result.host_events = self.host.events()
        return result

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

    def blocks_held_by(self, sequence: Sequence[Owner]) -> int:
        """How many blocks somebody holds who decodes."""
        return self.blocks_of(self.context_of(sequence))

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache of those who decode."""
        return self._context_tokens

    @property
    def steady_steps(self) -> int:
        """How many steps from now on only bring everybody one more token, until a request comes or is cancelled."""
        if not self._is_steady or self.partial is not None or not self.decoding or not self._may_coast:
            return 0
        ending = min(self._endings)
        return min(min(self._borders, default=ending), ending) - self.steps

    @property
    def _may_coast(self) -> bool:
        """Whether who waits goes on waiting as long as nothing ends."""
        return True

    def steady_ends(self, now_ms: float, steps: int) -> list[float]:
        """When each of the next steps ends, if nothing but time passes."""
        capacity_tokens = self.limits.num_blocks * self.limits.block_tokens
        count, decode_ms = len(self.decoding), self.timing.decode_ms
        context, ends = self._context_tokens, list[float]()
        for _ in range(steps):
            context += count
            now_ms += decode_ms(context, capacity_tokens, count)
            ends.append(now_ms)
        return ends

    def skip(self, steps: int) -> None:
        """Takes so many steps at once, no more than are steady."""
        assert steps <= self.steady_steps, "something happens in these steps"
        self.steps += steps
        self._context_tokens += steps * len(self.decoding)

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

    # Decoding: blocks, tokens, ends.

    def _grow(self, step: int) -> None:
        """Gives a block to everyone whose last one is full in this step."""
        raise NotImplementedError

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

    def _preempt(self, sequence: Sequence[Owner], step: int) -> None:
        """Takes back all its blocks; it will be computed again, with what it has said so far."""
        if sequence.state is State.DECODING:
            self._keep_computed(sequence, step)
            sequence.generated = step - sequence.birth
            self._leave_decode(sequence, step)
        else:
            self._leave_prefill(sequence)
        self.preemptions += 1
        self._requeue(sequence)

    def _keep_computed(self, sequence: Sequence[Owner], step: int) -> None:
        """What stays in the cache of somebody who is preempted."""
        self._settle(sequence, self.context_of(sequence, step))

    def _requeue(self, sequence: Sequence[Owner]) -> None:
        """Where somebody waits who was preempted."""
        self._enqueue(sequence, first=True)

    def _end(self, step: int) -> list[Sequence[Owner]]:
        """Those for whom this step's token is the last; they still hold their blocks."""
        finished = list(self._endings.pop(step, ()))
        for sequence in finished:
            self._context_tokens -= self.context_of(sequence, step)
            self._offsets.remove(self.context_of(sequence, 0))
            self._settle(sequence, self.context_of(sequence, step) + 1)
            del self.decoding[sequence]
            self._changed = True
        return finished

    def _decode(self, step: int) -> tuple[list[Sequence[Owner]], list[int]]:
        """One more token for everyone who goes on."""
        if self._changed:
            self._lineup = list(self.decoding)
            self._phases = [sequence.phase for sequence in self._lineup]
            self._changed = False
        self._context_tokens += len(self._lineup)
        ids, mask = self.source.ids, self.source.mask
        return self._lineup, [ids[(step + phase) & mask] for phase in self._phases]

    def _finish(self, sequence: Sequence[Owner], now_ms: float) -> None:
        if sequence.stays:
            self.kept[sequence] = None
        else:
            self._release(sequence)
        sequence.state = State.DONE
        sequence.generated = sequence.max_tokens
        sequence.finished_ms = now_ms
        sequence.last_token = self.source.ids[(sequence.offset + sequence.max_tokens - 1) & self.source.mask]

    def _leave_decode(self, sequence: Sequence[Owner], step: int | None = None) -> None:
        self._expect_nothing(sequence)
        self._context_tokens -= self.context_of(sequence, step)
        self._offsets.remove(self.context_of(sequence, 0))
        del self.decoding[sequence]
        self._changed = True
        self._release(sequence)

    def context_of(self, sequence: Sequence[Owner], step: int | None = None) -> int:
        """Tokens of a decoding sequence that are in the cache when the step (None: the next one) begins."""
        return len(sequence.prompt) + (self.steps if step is None else step) - sequence.birth - 1

    # Prefilling: admission, chunks, the first token.

    def _let_in(self, step: int) -> list[Sequence[Owner]]:
        """Who loaded and has it all: remote prompts go on with this step's token and are returned, others compute the rest."""
        if not (self.loading or self.loaded):
            return []
        for sequence in [one for one in self.loading if one.ready_ms <= self.now_ms]:
            del self.loading[sequence]
            self._settle(sequence, sequence.computed)
            self.loaded.append(sequence)
        started: list[Sequence[Owner]] = []
        while self.loaded and self.loaded[0].is_remote and self._running < self.limits.max_num_seqs:
            sequence = self.loaded.popleft()
            sequence.is_remote = False
            self._start_decoding(sequence, step)
            sequence.generated = 1
            started.append(sequence)
        return started

    @property
    def _running(self) -> int:
        return len(self.decoding) + (self.partial is not None)

    def _prefill(self, budget: int, ending: int, scheduled: ScheduledRequests) -> list[Sequence[Owner]]:
        """Computes prompts while the budget lasts, and notes what they were: whose prompt is complete."""
        computed, complete = 0, list[Sequence[Owner]]()
        lengths = Tally()
        room = self.limits.max_num_seqs - len(self.decoding) - ending
        while computed < budget:
            sequence = self.partial
            if sequence is None and len(complete) < room:
                sequence = self._next_loaded() or self._admit(budget - computed, is_alone=not complete)
            if sequence is None:
                break
            tokens = sequence.length - sequence.computed
            if self._cuts_prompts:
                tokens = min(tokens, budget - computed)
            lengths.add(sequence.length)
            scheduled.sum_prefill_kv_tokens += sequence.computed
            computed += tokens
            sequence.computed += tokens
            self._queued_tokens -= tokens
            self._settle(sequence, sequence.computed)
            self.partial = sequence if sequence.computed < sequence.length else None
            if self.partial is None:
                complete.append(sequence)
        scheduled.num_prefill_requests, scheduled.sum_prefill_tokens = lengths.count, computed
        scheduled.var_prefill_length = lengths.variance
        return complete

    @property
    def _cuts_prompts(self) -> bool:
        return self.limits.enable_chunked_prefill

    def _next_loaded(self) -> Sequence[Owner] | None:
        if not self.loaded or self.loaded[0].is_remote:
            return None
        sequence = self.loaded.popleft()
        sequence.state = State.PREFILLING
        return sequence

    def _admit(self, budget: int, *, is_alone: bool) -> Sequence[Owner] | None:
        """The oldest waiting sequence with the blocks it needs, if there is one and room for it.

        Without chunks a prompt longer than the budget has a step's prefill to itself, or it would wait for ever.
        One whose blocks come from elsewhere has its room, and whoever is behind it is looked at.
        """
        while self.waiting:
            sequence = self.waiting[0]
            hits = self._hits(sequence)
            onboarded = self._host_hits(sequence, hits)
            cached_tokens = (hits + onboarded) * self.limits.block_tokens
            if not (self._cuts_prompts or is_alone or sequence.length - cached_tokens <= budget or sequence.is_remote):
                return None
            held = sequence.hashes[:hits]
            blocks = self._blocks_needed(sequence) - hits
            if blocks + self.pool.price(held) + self._reserve(sequence, cached_tokens) > self.pool.free:
                return None
            self.pool.acquire(held)
            taken = self.pool.take(blocks)
            assert taken, "blocks were counted and are not there"
            self.waiting.popleft()
            self._queue_of(sequence).remove(sequence.length)
            self._queued_tokens -= sequence.length if sequence.is_remote else cached_tokens
            sequence.committed, sequence.private, sequence.computed = hits, blocks, cached_tokens
            self.admitted_tokens += sequence.length
            self.reused_tokens += cached_tokens
            if sequence.first_token_ms < 0:
                sequence.cached_tokens = cached_tokens
            if onboarded:
                assert self.host is not None
                sequence.ready_ms = self.host.fetch(sequence.hashes[hits : hits + onboarded], self.now_ms)
            elif sequence.is_remote:
                sequence.computed = sequence.length - 1
            if not onboarded and not sequence.is_remote:
                sequence.state = State.PREFILLING
                return sequence
            sequence.state = State.LOADING
            self.loading[sequence] = None
        return None

    def _blocks_needed(self, sequence: Sequence[Owner]) -> int:
        """How many blocks somebody holds from the beginning; the rest is for `_grow` to find."""
        return self.blocks_of(sequence.length - sequence.is_remote)

    def _reserve(self, sequence: Sequence[Owner], cached_tokens: int) -> int:
        """Blocks that must be free beyond those a sequence needs, so that those who run can grow."""
        return int(self.limits.num_blocks * WATERMARK) if self.pool.used else 0

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

    def _begin_decoding(
        self, prefilled: list[Sequence[Owner]], step: int, finished: list[Sequence[Owner]]
    ) -> list[Sequence[Owner]]:
        """Those whose prompt is complete have their first token; all but one-token answers decode from `step` on."""
        started = []
        for sequence in prefilled:
            sequence.generated += 1
            if sequence.generated == sequence.max_tokens:
                finished.append(sequence)
            else:
                self._start_decoding(sequence, step)
                started.append(sequence)
        return started

    def _start_decoding(self, sequence: Sequence[Owner], step: int) -> None:
        sequence.birth = step - sequence.generated
        sequence.phase = sequence.offset - sequence.birth
        sequence.state = State.DECODING
        self.decoding[sequence] = None
        self._changed = True
        context = self.context_of(sequence, step)
        self._context_tokens += context
        self._offsets.add(self.context_of(sequence, 0))
        self._expect_border(sequence, step + -context % self.limits.block_tokens)
        self._endings.setdefault(sequence.ending, {})[sequence] = None

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

    # Blocks.

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
