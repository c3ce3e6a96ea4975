"""SglangSimulation: SGLang's scheduler, which prefers prefill and reserves blocks for an estimated output length.

    step(now) ─▶ prefill, if a waiting prompt fits: no sequence decodes in this step
              └▶ otherwise a token for every decoding sequence; without enough free blocks, the sequences with the
                 fewest generated tokens are retracted and the estimate is corrected

The cache is a radix tree of pages: prompts are inserted when they are computed, answers when they are complete. A page's last
use, which determines eviction, is the completion of the last page of a sequence that contains it, not the end of the sequence. A
prompt for another worker is inserted when that worker has it, except the chunks before the last one. Chunks end at the end of a page, and
the token budget counts whole pages.
"""

from collections import deque
from dataclasses import dataclass, field

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.eviction import LastUsed
from dynamo.mocker.simulation.sequence import Owner, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.protocols.load import ScheduledRequests

RATIO_FIRST = 0.7  # Initial estimate of output length, as a share of the maximum length.
RATIO_LEAST_OF_FIRST = 0.14  # Lowest estimate as a share of the initial one, reached after `RATIO_STEPS` decode steps.
RATIO_STEPS = 600
RETRACT_STEPS = 20  # Further tokens per sequence that the estimate allows for after a retraction.
LONGEST_PREFIX_MAX = 128  # Queue length above which sorting by cached prefix costs more than it saves.


@dataclass(slots=True)
class SglangSimulation(Batching[Owner]):
    """One rank of SGLang."""

    ratio: float = field(init=False, default=0.0)
    """Estimated output length as a share of the maximum remaining length."""
    _computed: list[SimulatedSequence[Owner]] = field(init=False, default_factory=list)
    """Sequences whose prompts are computed in this step."""

    _uses: LastUsed | None = field(init=False, default=None)
    """Last uses of pages; None for another eviction policy."""

    def __post_init__(self) -> None:
        Batching.__post_init__(self)
        self.ratio = self._first_ratio
        if self.limits.eviction == "lineage":
            self._uses = self.pool.evict_by_use()

    def step(self, now_ms: float) -> StepResult[Owner]:
        """Execute one forward pass that begins at `now_ms`: either prefill or decode."""
        self.now_ms = now_ms
        self._open_reservations()
        scheduled = ScheduledRequests()
        complete = self._prompts(scheduled)
        if scheduled.sum_prefill_tokens:
            finished: list[SimulatedSequence[Owner]] = []
            duration_ms = self._duration_ms(scheduled)
            started = self._begin_decoding(complete, self.steps, finished)
            return self._result(duration_ms, started, self._first_tokens(started), finished, complete, scheduled)
        step, self.steps = self.steps, self.steps + 1
        arrived = self._let_in(step)
        self._grow(step)
        scheduled = self._scheduled_decodes()
        finished = self._end(step)
        sequences, tokens = self._decode(step)
        self.ratio = max(self.ratio - self._ratio_step, self._least_ratio) if self.decoding else self._first_ratio
        return self._result(self._duration_ms(scheduled), sequences, tokens, finished, arrived, scheduled)

    def skip(self, steps: int) -> None:
        """Execute `steps` steady steps at once, each of which lowers the estimate."""
        Batching.skip(self, steps)
        self.ratio = max(self.ratio - steps * self._ratio_step, self._least_ratio)

    @property
    def _may_coast(self) -> bool:
        return not self.waiting  # The estimate changes with every step and may admit a waiting sequence.

    @property
    def _may_cross(self) -> bool:
        return False  # The estimate changes with the steps that allocate a block.

    # Prefill.

    def _prompts(self, scheduled: ScheduledRequests) -> list[SimulatedSequence[Owner]]:
        if self.partial is None and not self.waiting and not self.loaded:
            return []
        if self.limits.sglang.schedule_policy == "lpm" and 1 < len(self.waiting) <= LONGEST_PREFIX_MAX:
            self.waiting = deque(sorted(self.waiting, key=self._hits, reverse=True))
        rules = self.limits.sglang
        budget = rules.max_prefill_tokens
        if self._cuts_prompts:
            budget = max(min(budget, rules.chunked_prefill_size), self.limits.block_tokens)
        complete = self._prefill(budget, 0, scheduled)
        for sequence in self._computed:
            if not sequence.stays or sequence.computed < sequence.length:
                self._settle(sequence, sequence.computed)
            sequence.prompted_at = self.steps - 0.5
        self._computed.clear()
        return complete

    def _settle_prompt(self, sequence: SimulatedSequence[Owner]) -> None:
        """Insert computed blocks into the tree after the step: prompts of one step do not share blocks."""
        self._computed.append(sequence)

    def _cut(self, budget: int) -> int:
        return budget // self.limits.block_tokens * self.limits.block_tokens

    def _spent(self, tokens: int) -> int:
        return self.blocks_of(tokens) * self.limits.block_tokens

    @property
    def _cuts_prompts(self) -> bool:
        return self.limits.enable_chunked_prefill and self.limits.sglang.chunked_prefill_size > 0

    def _reserve(self, sequence: SimulatedSequence[Owner], cached_tokens: int) -> int:
        """Return the blocks for the estimated output of running sequences and the maximum output of this one.

        Return 0 if no other sequence holds blocks.
        """
        if not self.pool.used:
            return 0
        clip = self.limits.sglang.clip_max_new_tokens
        step = self.steps
        tokens = sum(min(one.max_tokens - step + one.birth, clip) for one in self.decoding) * self.ratio
        if self.partial is not None:
            tokens += min(self.partial.max_tokens, clip) * self.ratio
        own = min(sequence.max_tokens - sequence.generated, clip)
        return self.blocks_of(int(tokens) + own)

    # Last uses of pages, in decode steps; prefill lies between two of them.

    def _start_decoding(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        Batching._start_decoding(self, sequence, step)
        sequence.prompted_at = self.steps - 0.5

    def let_go(self, sequence: SimulatedSequence[Owner]) -> None:
        """Release the blocks of a finished sequence that was submitted with `stays`, after inserting them into the tree."""
        if sequence in self.kept:
            self._settle(sequence, sequence.computed)
        Batching.let_go(self, sequence)

    def _finish(self, sequence: SimulatedSequence[Owner], now_ms: float) -> None:
        if sequence.stays:
            Batching._finish(self, sequence, now_ms)
            return
        tokens = len(sequence.prompt) + sequence.max_tokens
        if self.blocks_of(tokens) <= sequence.committed + sequence.private:
            self._settle(
                sequence, tokens
            )  # The last token counts, although it is not computed, if its page is allocated.
        Batching._finish(self, sequence, now_ms)

    def _release(self, sequence: SimulatedSequence[Owner]) -> None:
        if self._uses is not None and sequence.committed:
            self._uses.use(sequence.hashes[: sequence.committed], self._last_use(sequence))
        Batching._release(self, sequence)

    def _last_use(self, sequence: SimulatedSequence[Owner]) -> float:
        """Return the decode step that completed the last page of a sequence."""
        prompt, size = len(sequence.prompt), self.limits.block_tokens
        answered = (prompt + self.generated_tokens(sequence)) // size * size - prompt
        return max(sequence.prompted_at, float(sequence.birth + answered - 1) if answered > 0 else 0.0)

    # Decode.

    def _grow(self, step: int) -> None:
        due = self._borders.pop(step, {})
        if len(due) > self.pool.free:
            self._retract(due, step)
        taken = self.pool.take(len(due))
        assert taken, "a single sequence must always fit"
        for sequence in due:
            sequence.private += 1
            self._expect_border(sequence, step + self.limits.block_tokens)

    def _retract(self, due: dict[SimulatedSequence[Owner], None], step: int) -> None:
        """Preempt the sequences with the fewest generated tokens, longest prompt first, until the others can grow."""
        while len(due) > self.pool.free:
            victim = min(self.decoding, key=lambda one: (step - one.birth, -len(one.prompt)))
            due.pop(victim, None)
            self._preempt(victim, step)
        tokens = sum(step - one.birth for one in self.decoding)
        wanted = sum(one.max_tokens for one in self.decoding)
        self.ratio = min(1.0, (tokens + RETRACT_STEPS * len(self.decoding)) / wanted) if wanted else 1.0

    def _keep_computed(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        """Discard generated tokens: SGLang inserts them into the tree only when an answer is complete."""

    def _requeue(self, sequence: SimulatedSequence[Owner]) -> None:
        self._enqueue(sequence)

    # The estimate of output length.

    @property
    def _first_ratio(self) -> float:
        return min(RATIO_FIRST * self.limits.sglang.schedule_conservativeness, 1.0)

    @property
    def _least_ratio(self) -> float:
        return self._first_ratio * RATIO_LEAST_OF_FIRST

    @property
    def _ratio_step(self) -> float:
        return (self._first_ratio - self._least_ratio) / RATIO_STEPS
