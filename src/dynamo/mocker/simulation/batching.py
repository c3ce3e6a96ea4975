"""Batching: continuous batching in simulated time, the common part of the engines' schedulers.

    step(now) ─▶ every running sequence gets the block that its next token needs,
                 prompts use the rest of the token budget, oldest first,
                 and the result has the step's duration and the tokens that it generates.

Tokens have no cost in this implementation: all decoding sequences advance by one per step, so the step number replaces
per-sequence counters, and a sequence is processed only in steps in which it needs a block or ends (`_borders`,
`_endings`).

A sequence whose blocks are copied from host memory or from a prefill worker holds its device blocks while it waits for
them (`loading`), and is scheduled after their arrival (`loaded`).
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.core.tally import Tally
from dynamo.mocker.simulation.blocks import Change
from dynamo.mocker.simulation.rank_state import RankState
from dynamo.mocker.simulation.sequence import Owner, SequenceState, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.timing import decode_ends
from dynamo.protocols.load import ForwardPass, ScheduledRequests, WorkerLoad
from dynamo.tokens.hashing import SEED

PAUSE_MS = 1e-3  # Minimum pause; a shorter one could be lost in rounding and repeated endlessly.
UNOBSERVED = WorkerLoad()
COAST_STEPS = (
    256  # Most steps that cross borders: their times are computed in advance, and most coasts are interrupted.
)
NEVER_STEPS = 1 << 62
IDLE_STEP_MS = 1.0  # Duration of a step that computes nothing while sequences wait.


def _whole_means(scheduled: ScheduledRequests) -> int:
    """Return the new prompt tokens of a step as upstream computes them: from the mean lengths of its prompts, in whole tokens."""
    count, cached, new = (
        scheduled.num_prefill_requests,
        scheduled.sum_prefill_kv_tokens,
        scheduled.sum_prefill_tokens,
    )
    return count * ((cached + new) // count - cached // count) if count > 1 else new


@dataclass(slots=True)
class Batching(RankState[Owner], abc.ABC):
    """One rank of an engine. Every sequence must fit into its blocks: see `blocks_of`."""

    def submit(
        self,
        owner: Owner,
        prompt: list[int] | range,
        max_tokens: int,
        now_ms: float,
        hash_seed: int = SEED,
        named: tuple[bytes, list[int]] | None = None,
        *,
        is_remote: bool = False,
        stays: bool = False,
    ) -> SimulatedSequence[Owner]:
        """Append a request to the waiting queue.

        `prompt`: a range if the answer's tokens are not used. `named`: packed token hashes and sequence hashes of the prompt's first
        blocks, if already computed.
        `is_remote`: the prompt is computed by another worker; the sequence holds its blocks until `arrive` is called.
        `stays`: the blocks are held after the end of the sequence, until `let_go`.
        """
        assert prompt, "the prompt is empty"
        assert max_tokens > 0, "max_tokens must be positive"
        assert self.blocks_of(len(prompt) + max_tokens - 1) <= self.limits.num_blocks, (
            "the sequence needs more blocks than the rank has"
        )
        sequence = SimulatedSequence(owner, prompt, max_tokens, now_ms, self.source.offset(), hash_seed)
        sequence.is_remote, sequence.stays = is_remote, stays
        sequence.ready_ms = math.inf if is_remote else 0.0
        if named is not None:
            sequence.packed, sequence.hashes = named
        self._enqueue(sequence)
        return sequence

    def cancel(self, sequence: SimulatedSequence[Owner]) -> None:
        """Remove a request; a finished one is unchanged."""
        self._is_steady = False
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self._queue_of(sequence).remove(sequence.length)
            self._queued_tokens -= sequence.length
        elif sequence.state is SequenceState.PREFILLING:
            self._leave_prefill(sequence)
        elif sequence.state is SequenceState.DECODING:
            self._leave_decode(sequence)
        elif sequence.state is SequenceState.LOADING:
            self._leave_loading(sequence)
        sequence.state = SequenceState.DONE

    def arrive(self, sequence: SimulatedSequence[Owner], ready_ms: float) -> None:
        """Set the arrival time of a remote prompt's blocks; may be called before the sequence holds blocks."""
        assert sequence.is_remote, "the sequence is not remote"
        self._is_steady = False
        sequence.ready_ms = ready_ms

    def reserve(self, now_ms: float) -> None:
        """Reserve blocks for waiting remote prompts between two steps, if no sequence runs; otherwise the next step does it."""
        if not (self.decoding or self.loaded) and self.partial is None:
            self.now_ms = now_ms
            self._open_reservations()
            self._admit(0, is_alone=True, only_remote=True)

    def transfer(self, sequence: SimulatedSequence[Owner], transfer_ms: float) -> None:
        """Set the duration of the transfer of a remote prompt, which begins when its blocks are reserved."""
        assert sequence.is_remote, "the sequence is not remote"
        self._is_steady = False
        sequence.transfer_ms = transfer_ms

    def let_go(self, sequence: SimulatedSequence[Owner]) -> None:
        """Release the blocks of a finished sequence that was submitted with `stays`."""
        sequence.stays = False
        if sequence in self.kept:
            self._is_steady = False
            del self.kept[sequence]
            self._release(sequence)

    def step(self, now_ms: float) -> StepResult[Owner]:
        """Execute one forward pass that begins at `now_ms`."""
        self.now_ms = now_ms
        step, self.steps = self.steps, self.steps + 1
        self._open_reservations()
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
            if self.is_observed:
                tokens = tokens + self._first_tokens(started)
        return self._result(duration_ms, sequences, tokens, finished, prefilled + complete, scheduled)

    def _scheduled_decodes(self) -> ScheduledRequests:
        return ScheduledRequests(
            num_decode_requests=len(self.decoding),
            sum_decode_kv_tokens=self._context_tokens + len(self.decoding),
            var_decode_kv_tokens=self._offsets.variance,
        )

    def _duration_ms(self, scheduled: ScheduledRequests) -> float:
        """Return the duration of a step; without work, the time until the next copy, at most `IDLE_STEP_MS`."""
        capacity_tokens = self.limits.num_blocks * self.limits.block_tokens
        new_tokens, decodes = scheduled.sum_prefill_tokens, scheduled.num_decode_requests
        if not new_tokens and not decodes:
            ready_ms = min((sequence.ready_ms for sequence in self.loading), default=math.inf)
            if self.host is not None:
                ready_ms = min(ready_ms, self.host.next_ms)
            return min(max(ready_ms - self.now_ms, PAUSE_MS), IDLE_STEP_MS)
        decode_ms = self.timing.decode_ms(scheduled.sum_decode_kv_tokens, capacity_tokens, decodes)
        return self.timing.prefill_ms(_whole_means(scheduled)) + decode_ms

    def _first_tokens(self, started: list[SimulatedSequence[Owner]]) -> list[int]:
        ids, mask = self.source.ids, self.source.mask
        return [ids[(sequence.offset + sequence.generated - 1) & mask] for sequence in started]

    def _result(
        self,
        duration_ms: float,
        sequences: list[SimulatedSequence[Owner]],
        tokens: list[int],
        finished: list[SimulatedSequence[Owner]],
        prefilled: list[SimulatedSequence[Owner]],
        scheduled: ScheduledRequests,
    ) -> StepResult[Owner]:
        """Update the state for the end of the step and return its result."""
        end_ms = self.now_ms + duration_ms
        for sequence in prefilled:
            if sequence.first_token_ms < 0:
                sequence.first_token_ms = end_ms
        for sequence in finished:
            self._finish(sequence, end_ms)
        is_full = not self._reservable and bool(self.waiting)  # The next step may reserve blocks.
        self._is_steady = not (scheduled.sum_prefill_tokens or finished or self._has_arrivals or is_full)
        passed = ForwardPass(duration_ms / 1000, scheduled, self._queue_metrics())
        load = self.load() if self.is_observed else UNOBSERVED
        result = StepResult(duration_ms, sequences, tokens, finished, prefilled, self.pool.changes(), load, passed)
        if self.host is not None:
            self.host.offload(result.events, end_ms)
            self.host.settle(end_ms)
            result.host_events = self.host.events()
        return result

    @property
    def steady_steps(self) -> int:
        """Return how many of the next steps only decode, provided that no request arrives or is cancelled."""
        if not self._is_steady or self.partial is not None or not self.decoding or not self._may_coast:
            return 0
        ending = min(self._endings)
        return min(min(self._borders, default=ending), ending) - self.steps

    def coast_steps(self, *, crosses_borders: bool, is_direct: bool) -> int:
        """Return how many of the next steps compute no prompt and end no sequence, provided that no request arrives or is cancelled.

        `crosses_borders`: include steps that allocate a block without preemption, which are executed by `cross`; at most `COAST_STEPS`
        steps then. `is_direct`: also right after a step that computed a prompt or ended a sequence, where no sequence waits.
        """
        if not crosses_borders or self.host is not None or not self._may_cross:
            return self.steady_steps
        is_steady = self._is_steady or (is_direct and not (self.waiting or self._has_arrivals))
        if not is_steady or self.partial is not None or not self.decoding:
            return 0
        steps = min(min(self._endings) - self.steps, COAST_STEPS)
        needed = len(self.decoding) * (steps // self.limits.block_tokens + 1)
        return steps if needed <= self.pool.free else min(steps, self.border_in)

    @property
    def _has_arrivals(self) -> bool:
        """Return whether blocks that are being copied arrive at a known time, or have arrived."""
        if not self.loading:  # Nearly always.
            return bool(self.loaded)
        return bool(self.loaded) or any(sequence.ready_ms < math.inf for sequence in self.loading)

    @property
    def border_in(self) -> int:
        """Return how many steps come before the next one that allocates a block; more than any answer has if there is none."""
        return min(self._borders, default=self.steps + NEVER_STEPS) - self.steps

    @property
    def _may_coast(self) -> bool:
        """Return whether waiting sequences cannot be admitted until a running one ends."""
        return True

    @property
    def _may_cross(self) -> bool:
        """Return whether allocating a block has no effect on the scheduler's later decisions except by the number of free blocks."""
        return True

    def cross(self, now_ms: float) -> list[Change]:
        """Execute a step of `coast_steps` that allocates a block and begins at `now_ms`; return the changes of the cache."""
        self.now_ms = now_ms
        step, self.steps = self.steps, self.steps + 1
        self._grow(step)
        self._context_tokens += len(self.decoding)
        return self.pool.changes()

    def steady_ends(self, now_ms: float, steps: int) -> Sequence[float]:
        """Return the end times of the next steady steps."""
        capacity_tokens = self.limits.num_blocks * self.limits.block_tokens
        count, context = len(self.decoding), self._context_tokens
        contexts = range(context + count, context + count * (steps + 1), count)
        return decode_ends(self.timing, now_ms, contexts, capacity_tokens, count)

    def skip(self, steps: int) -> None:
        """Execute `steps` steady steps at once, of which none needs a block (`border_in`)."""
        self.steps += steps
        self._context_tokens += steps * len(self.decoding)

    # Decoding: blocks, tokens, ends of sequences.

    @abc.abstractmethod
    def _grow(self, step: int) -> None:
        """Allocate a block for every sequence whose last block becomes full in this step."""

    def _preempt(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        """Release all blocks of a sequence and queue it for recomputation, including its generated tokens."""
        if sequence.state is SequenceState.DECODING:
            self._keep_computed(sequence, step)
            sequence.generated = step - sequence.birth
            sequence.paused_ms = self.now_ms
            self._leave_decode(sequence, step)
        else:
            self._leave_prefill(sequence)
        self.preemptions += 1
        self._requeue(sequence)

    def _keep_computed(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        """Commit the computed blocks of a preempted sequence, so that they stay in the cache."""
        self._settle(sequence, self.context_of(sequence, step))

    def _requeue(self, sequence: SimulatedSequence[Owner]) -> None:
        """Queue a preempted sequence."""
        self._enqueue(sequence, first=True)

    def _end(self, step: int) -> list[SimulatedSequence[Owner]]:
        """Return the sequences whose last token is generated in this step; they still hold their blocks."""
        finished = list(self._endings.pop(step, ()))
        for sequence in finished:
            self._context_tokens -= self.context_of(sequence, step)
            self._offsets.remove(self.context_of(sequence, 0))
            self._settle(sequence, self.context_of(sequence, step) + 1)
            del self.decoding[sequence]
            self._changed = True
        return finished

    def _decode(self, step: int) -> tuple[list[SimulatedSequence[Owner]], list[int]]:
        """Return the sequences that continue, and one token for each."""
        if self._changed:
            self._lineup = list(self.decoding)
            self._phases = [sequence.phase for sequence in self._lineup]
            self._changed = False
        self._context_tokens += len(self._lineup)
        if not self.is_observed:
            return self._lineup, []
        ids, mask = self.source.ids, self.source.mask
        return self._lineup, [ids[(step + phase) & mask] for phase in self._phases]

    def _finish(self, sequence: SimulatedSequence[Owner], now_ms: float) -> None:
        if sequence.stays:
            self.kept[sequence] = None
        else:
            self._release(sequence)
        sequence.state = SequenceState.DONE
        sequence.generated = sequence.max_tokens
        sequence.finished_ms = now_ms
        if self.is_observed:
            sequence.last_token = self.source.ids[(sequence.offset + sequence.max_tokens - 1) & self.source.mask]

    # Prefilling: admission, chunks, the first token.

    def _let_in(self, step: int) -> list[SimulatedSequence[Owner]]:
        """Schedule loaded sequences: return remote ones with a complete prompt; others compute the rest of it first."""
        if self.waiting and self.waiting[0].transfer_ms == 0.0:  # Reserved and scheduled in the same step.
            self._admit(0, is_alone=True, only_remote=True)
        if not (self.loading or self.loaded):
            return []
        for sequence in [one for one in self.loading if one.ready_ms <= self.now_ms]:
            del self.loading[sequence]
            self._settle(sequence, sequence.computed)
            self.loaded.append(sequence)
        started: list[SimulatedSequence[Owner]] = []
        while self.loaded and self.loaded[0].is_remote and self._running < self.limits.max_num_seqs:
            sequence = self.loaded.popleft()
            sequence.is_remote = False
            self._start_decoding(sequence, step)
            sequence.generated = 1
            started.append(sequence)
        return started

    def _prefill(self, budget: int, ending: int, scheduled: ScheduledRequests) -> list[SimulatedSequence[Owner]]:
        """Compute prompts up to the token budget, add them to `scheduled`, and return the completed sequences."""
        if self.partial is None and not self.waiting and not self.loaded:
            return []
        computed, spent, complete = 0, 0, list[SimulatedSequence[Owner]]()
        lengths = Tally()
        free_slots = self.limits.max_num_seqs - len(self.decoding) - ending
        while spent < budget and (not self._cuts_prompts or self._cut(budget - spent)):
            sequence = self.partial
            if sequence is None and len(complete) < free_slots:
                sequence = self._next_loaded() or self._admit(budget - spent, is_alone=not complete)
            if sequence is None:
                break
            tokens = sequence.length - sequence.computed
            if self._cuts_prompts:
                tokens = min(tokens, self._cut(budget - spent))
            lengths.add(sequence.length)
            scheduled.sum_prefill_kv_tokens += sequence.computed
            computed += tokens
            spent += self._spent(tokens)
            sequence.computed += tokens
            self._queued_tokens -= tokens
            self._settle_prompt(sequence)
            self.partial = sequence if sequence.computed < sequence.length else None
            if self.partial is None:
                complete.append(sequence)
        scheduled.num_prefill_requests, scheduled.sum_prefill_tokens = lengths.count, computed
        scheduled.var_prefill_length = lengths.variance
        return complete

    def _settle_prompt(self, sequence: SimulatedSequence[Owner]) -> None:
        """Commit the computed blocks of a prompt; later prompts of the same step share them."""
        self._settle(sequence, sequence.computed)

    def _cut(self, budget: int) -> int:
        """Return the most tokens of one prompt that a step computes with the rest of its token budget."""
        return budget

    def _spent(self, tokens: int) -> int:
        """Return the part of the token budget that is spent on `tokens` tokens of one prompt."""
        return tokens

    @property
    def _cuts_prompts(self) -> bool:
        return self.limits.enable_chunked_prefill

    def _next_loaded(self) -> SimulatedSequence[Owner] | None:
        if not self.loaded or self.loaded[0].is_remote:
            return None
        sequence = self.loaded.popleft()
        sequence.state = SequenceState.PREFILLING
        return sequence

    def _admit(self, budget: int, *, is_alone: bool, only_remote: bool = False) -> SimulatedSequence[Owner] | None:
        """Admit the oldest waiting sequence for which enough blocks are free; None if there is none.

        Without chunked prefill, a prompt longer than the budget is prefilled alone; otherwise it would wait forever.
        A sequence whose blocks are copied only reserves them, and the next waiting sequence is considered.
        """
        while self.waiting:
            sequence = self.waiting[0]
            if (only_remote and not sequence.is_remote) or (sequence.is_remote and not self._reservable):
                return None
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
            assert taken, "counted blocks are not free"
            self.waiting.popleft()
            self._queue_of(sequence).remove(sequence.length)
            self._queued_tokens -= sequence.length if sequence.is_remote else cached_tokens
            sequence.committed, sequence.private, sequence.computed = hits, blocks, cached_tokens
            if not sequence.is_remote:
                self.admitted_tokens += sequence.length
                self.reused_tokens += cached_tokens
            if sequence.first_token_ms < 0:
                sequence.cached_tokens = cached_tokens
            if onboarded:
                assert self.host is not None
                sequence.ready_ms = self.host.fetch(sequence.hashes[hits : hits + onboarded], self.now_ms)
            elif sequence.is_remote:
                self._reservable -= 1
                sequence.computed = sequence.length - 1
                if sequence.transfer_ms is not None:
                    sequence.ready_ms = self.now_ms + sequence.transfer_ms
            if not onboarded and not sequence.is_remote:
                sequence.state = SequenceState.PREFILLING
                return sequence
            sequence.state = SequenceState.LOADING
            self.loading[sequence] = None
        return None

    def _open_reservations(self) -> None:
        """Set the number of remote prompts for which this step may reserve blocks: one while sequences decode, as upstream.

        Any number if a remote prompt arrives.
        """
        has_arrival = bool(self.loading) and any(
            sequence.is_remote and sequence.ready_ms <= self.now_ms for sequence in self.loading
        )
        self._reservable = 1 if self.decoding and not has_arrival else len(self.waiting)

    def _blocks_needed(self, sequence: SimulatedSequence[Owner]) -> int:
        """Return the number of blocks allocated at admission; `_grow` allocates the others."""
        return self.blocks_of(sequence.length - sequence.is_remote)

    def _reserve(self, sequence: SimulatedSequence[Owner], cached_tokens: int) -> int:
        """Return the number of blocks to keep free at admission, so that running sequences can grow.

        None, as in the released simulations of vLLM and TensorRT-LLM.
        """
        return 0

    def _begin_decoding(
        self, prefilled: list[SimulatedSequence[Owner]], step: int, finished: list[SimulatedSequence[Owner]]
    ) -> list[SimulatedSequence[Owner]]:
        """Emit first tokens of completed prompts; sequences that need more tokens decode from `step` on."""
        started = []
        for sequence in prefilled:
            sequence.generated += 1
            if sequence.generated == sequence.max_tokens:
                finished.append(sequence)
            else:
                self._start_decoding(sequence, step)
                started.append(sequence)
        return started

    def _start_decoding(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        sequence.birth = step - sequence.generated
        sequence.phase = sequence.offset - sequence.birth
        sequence.state = SequenceState.DECODING
        self.decoding[sequence] = None
        self._changed = True
        context = self.context_of(sequence, step)
        self._context_tokens += context
        self._offsets.add(self.context_of(sequence, 0))
        self._expect_border(sequence, step + -context % self.limits.block_tokens)
        self._endings.setdefault(sequence.ending, {})[sequence] = None
