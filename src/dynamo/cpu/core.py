"""Core: one engine step: plan, compute, sample, check stop rules. No threads and no clock, so tests can drive it."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.tally import Tally
from dynamo.cpu.adapter import Adapted, Adapter, rows_of
from dynamo.cpu.attention import F32
from dynamo.cpu.disagg import BlockExporter, BlockPuller, params_of
from dynamo.cpu.generation import ActiveGeneration, Fetch, GeneratedChoice
from dynamo.cpu.model import Batch, TransformerModel
from dynamo.cpu.sampler import Sampled, greedy, sample, score
from dynamo.cpu.scheduler import Chunk, Scheduler
from dynamo.cpu.sequence import TokenSequence
from dynamo.cpu.spans import Ids, TokenSpan
from dynamo.cpu.tiers import CacheTiers
from dynamo.kvbm.logical.consolidator import TierEvent
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.kv_events import KvEvent
from dynamo.protocols.load import ForwardPass, QueuedRequests, ScheduledRequests, WorkerLoad

SCORED_LOGITS_MAX = 1 << 21  # Logits of prompt tokens computed at a time: 16 MB in double precision.


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step for one request: a token, an output with more data, or the error that ends the request."""

    generation: ActiveGeneration
    word: int | EngineOutput | Exception
    is_last: bool


@dataclass(slots=True)
class StepOutcome:
    """All results of a step."""

    outputs: list[StepOutput] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    """KV events of the cache, if there are no tiers below it."""
    tier_events: list[TierEvent] = field(default_factory=list)
    """KV events of the cache and of the tiers below it."""
    load: WorkerLoad = field(default_factory=WorkerLoad)
    passed: ForwardPass | None = None
    """Measurements of the step, if anything was computed; the caller adds the duration."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a batch whose logits score tokens of one prompt."""

    sequence: TokenSequence
    positions: range
    """Positions in the sequence; the logits at each one score the token that follows it."""
    rows: Ids
    """Row indexes in the batch."""


class Core:
    """The scheduler, the model and the running requests."""

    def __init__(
        self,
        model: TransformerModel,
        scheduler: Scheduler,
        block_tokens: int,
        tiers: CacheTiers | None = None,
        *,
        exporter: BlockExporter | None = None,
        puller: BlockPuller | None = None,
    ) -> None:
        """`exporter` keeps blocks for decode workers, `puller` fetches them from prefill workers."""
        self.scheduler = scheduler
        self._tiers = tiers
        self._exporter = exporter
        self._puller = puller
        self._early: list[StepOutput] = []
        """Results for requests whose first token arrived with the request."""
        self._model = model
        self._block_tokens = block_tokens
        self._choices: dict[TokenSequence, tuple[ActiveGeneration, GeneratedChoice]] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._early)

    def add(self, generation: ActiveGeneration) -> None:
        for choice in generation.choices:
            self._choices[choice.sequence] = (generation, choice)
            self.scheduler.add(choice.sequence)
        if generation.fetch is not None:
            if any(choice.prompt_logprobs is not None for choice in generation.choices):
                self._abandon(generation)  # Fetched blocks have no logits, so this worker computes the prompt.
            else:
                self._pull_blocks(generation, generation.fetch)

    def drop(self, generation: ActiveGeneration) -> None:
        """Remove a request; no effect if it has already ended."""
        for choice in generation.choices:
            if self._choices.pop(choice.sequence, None) is not None:
                self.scheduler.finish(choice.sequence)
        self._abandon(generation)
        if generation.meeting is not None and self._exporter is not None:
            self._exporter.fail_session(generation.meeting, "the request ended")

    def end_fetch(self, fetch: Fetch, *, is_whole: bool) -> None:
        """Record that the fetch of a request's blocks completed or failed."""
        assert fetch.sequence is not None, "a fetch ended that was never started"
        self.scheduler.end_fetch(fetch.sequence, is_whole=is_whole)

    def step(self) -> StepOutcome:
        """Compute the scheduler's plan and sample a token for each sequence whose tokens are all computed."""
        outcome = StepOutcome()
        if self._early:  # Emitted before anything is computed, because it is already known.
            outcome.outputs, self._early = self._early, []
            outcome.load = self.load()
            return outcome
        tiers = self._tiers
        chunks = _in_rows(self.scheduler.plan())
        if tiers is not None:
            tiers.execute(
                self.scheduler.pool.take_evicted()
            )  # Must run before anything is fetched into evicted blocks.
        self._exchange_blocks()
        if tiers is not None and not chunks and self.has_work:
            tiers.wait()
        if chunks:
            outcome.passed = _passed(chunks, self.scheduler.waiting)
            ending = [chunk.is_last for chunk in chunks]
            batch = _batch(chunks, ending, self._block_tokens)
            scored = _rows_to_score(chunks, batch)
            states = self._model.states(_with_rows(batch, scored))
            logits = self._model.logits(states[: len(batch.wanted)])
            self.scheduler.advance(chunks)
            self._score(scored, states[len(batch.wanted) :], outcome)
            if self._exporter is not None:
                for chunk, is_last in zip(chunks, ending, strict=True):
                    if not is_last:
                        self._send_part(self._exporter, chunk.sequence)
            sequences = [chunk.sequence for chunk, is_last in zip(chunks, ending, strict=True) if is_last]
            self._sample(sequences, logits, outcome)
        events = self.scheduler.pool.take_events()
        if tiers is None:
            outcome.events = events
        else:
            outcome.tier_events = tiers.consolidate(events)
        outcome.load = self.load()
        return outcome

    def clear(self) -> None:
        """Remove all cached prefixes, in the cache and in the tiers."""
        self.scheduler.pool.clear()
        if self._tiers is not None:
            self._tiers.clear()

    def reidentify(self, fingerprint: str) -> None:
        """Discard all blocks after new weights were loaded; tiers keep the blocks if the fingerprint is unchanged."""
        self.scheduler.pool.clear()
        if self._tiers is not None:
            self._tiers.reidentify(fingerprint)

    def forget_cache(self) -> None:
        """Free the cache's memory; the tiers keep their blocks. No request may be running."""
        assert not self._choices, "the cache was freed while requests are running"
        self.scheduler.pool.clear()
        self._model.cache.release()

    @property
    def model(self) -> TransformerModel:
        return self._model

    def load(self) -> WorkerLoad:
        """Return the current load of this engine."""
        scheduler = self.scheduler
        prefilling = [
            sequence.pending
            for sequence in (*scheduler.running, *scheduler.waiting)
            if sequence.pending > 1 and not sequence.is_remote
        ]
        return WorkerLoad(
            active_decode_blocks=scheduler.pool.used,
            active_prefill_tokens=sum(prefilling),
            kv_used_blocks=scheduler.pool.used,
            kv_total_blocks=scheduler.pool.total,
            running_requests=len(scheduler.running) + len(scheduler.fetching),
            waiting_requests=len(scheduler.waiting),
        )

    def _score(self, scored: Items[ScoredRows], states: F32, outcome: StepOutcome) -> None:
        """Keep the log-probabilities of prompt tokens; `states` has the normalised rows of all of them, in order."""
        rows_max = max(1, SCORED_LOGITS_MAX // self._model.shape.vocab_size)
        row = 0
        for one in scored:
            sequence, positions = one.sequence, one.positions
            generation, choice = self._choices[sequence]
            requested = choice.prompt_logprobs
            assert requested is not None, "scores were computed for a sequence that did not request them"
            with ErrorBoundary(partial(self._drop_failed, generation, outcome.outputs)):
                for first in range(positions.start, positions.stop, rows_max):
                    end = min(first + rows_max, positions.stop)
                    at = row + first - positions.start
                    logits = self._model.logits(states[at : at + end - first])
                    requested.scores += score(logits, sequence.tokens[first + 1 : end + 1], requested.count)
                    sequence.scored = end + 1
            row += len(positions)

    def _sample(self, sequences: Items[TokenSequence], logits: F32, outcome: StepOutcome) -> None:
        likeliest = greedy(logits) if any(self._choices[sequence][1].is_plain for sequence in sequences) else []
        for row, sequence in enumerate(sequences):
            if sequence not in self._choices:
                continue  # Another choice of the same request failed in this very step.
            generation, choice = self._choices[sequence]
            try:
                if choice.is_plain and np.isfinite(logits[row, likeliest[row]]):
                    token, output = likeliest[row], choice.emit(Sampled(likeliest[row]))
                elif (draw := choice.draw()) is None:
                    token, output = -1, choice.end()
                else:
                    sampled = sample(logits[row], draw)
                    token, output = sampled.token, choice.emit(sampled)
            except Exception as error:  # noqa: BLE001 - request boundary; no context manager: this runs for every token
                self._drop_failed(generation, outcome.outputs, error)
                continue
            output = choice.with_prompt_logprobs(token, output)
            outcome.outputs.append(self._output_of(generation, choice, token, output))

    def _output_of(
        self, generation: ActiveGeneration, choice: GeneratedChoice, token: int, output: EngineOutput | None
    ) -> StepOutput:
        if output is None:
            return StepOutput(generation, token, is_last=False)
        if output.finish_reason is None:
            return StepOutput(generation, output, is_last=False)
        generation.unfinished -= 1
        if generation.unfinished == 0:
            output.completion_usage = generation.usage()
        del self._choices[choice.sequence]
        if generation.is_prefill and self._exporter is not None:
            self._export(self._exporter, generation, choice, output)
        else:
            self.scheduler.finish(choice.sequence)
        if generation.unfinished == 0:
            self._abandon(generation)
        return StepOutput(generation, output, is_last=generation.unfinished == 0)

    # Block transfer between prefill and decode workers.

    def _exchange_blocks(self) -> None:
        """Start the transfers that the plan requires."""
        if self._puller is not None:
            for sequence in self.scheduler.take_started():
                fetch = self._choices[sequence][0].fetch
                assert fetch is not None, "a sequence is fetching without a source"
                fetch.sequence = sequence
                self._puller.begin(fetch)
        if self._exporter is not None and self.scheduler.is_starved:
            self._exporter.release_oldest()

    def _send_part(self, exporter: BlockExporter, sequence: TokenSequence) -> None:
        """Export the completed blocks of a prompt to the decode worker that waits for them."""
        generation, _ = self._choices[sequence]
        meeting, end = generation.meeting, sequence.computed // self._block_tokens
        if meeting is None or end <= generation.exported:
            return
        blocks = self.scheduler.export_part(sequence, generation.exported, end)
        descriptor = exporter.export(blocks)
        if descriptor is None:  # The hold limit is reached; the decode worker computes the prompt.
            self.scheduler.release_export(blocks)
            exporter.fail_session(meeting, "no more blocks can be kept")
            generation.meeting = None
            return
        exporter.send_part(meeting, generation.exported, descriptor)
        generation.exported = end

    def _export(
        self, exporter: BlockExporter, generation: ActiveGeneration, choice: GeneratedChoice, output: EngineOutput
    ) -> None:
        """Keep the blocks of a prompt for the decode worker and put their location into the output."""
        blocks = self.scheduler.export(choice.sequence, generation.exported)
        descriptor = exporter.export(blocks)
        if descriptor is None:
            self.scheduler.release_export(blocks)
        sequence = choice.sequence
        output.disaggregated_params = params_of(
            descriptor, output, sequence.prompt_tokens, sequence.cached_tokens,
            None if sequence.adapter is None else sequence.adapter.fingerprint,
        )  # fmt: skip
        if generation.meeting is not None:
            exporter.finish_session(generation.meeting, output.disaggregated_params)
        output.finish_reason, output.stop_reason = "length", None  # The decode worker determines the finish reason.

    def _pull_blocks(self, generation: ActiveGeneration, fetch: Fetch) -> None:
        """Continue the first choice from the token computed with the prompt and fetch its blocks."""
        generation.choices[0].sequence.is_remote = True
        self._emit_first(generation, fetch)

    def emit_first(self, fetch: Fetch) -> None:
        """Handle the first output token that arrived before the prompt's blocks."""
        if fetch.sequence in self._choices:
            self._emit_first(self._choices[fetch.sequence][0], fetch)

    def _emit_first(self, generation: ActiveGeneration, fetch: Fetch) -> None:
        choice, first = generation.choices[0], fetch.first
        choice.sequence.cached_tokens = fetch.cached_tokens
        if first is None or first.token in choice.rules.forbidden(0):
            return
        with ErrorBoundary(partial(self._drop_failed, generation, self._early)):
            self._early.append(self._output_of(generation, choice, first.token, choice.emit(first)))

    def _drop_failed(self, generation: ActiveGeneration, outputs: list[StepOutput], error: Exception) -> None:
        """Drop a request whose output failed; other requests of this step continue."""
        self.drop(generation)
        outputs.append(StepOutput(generation, error, is_last=True))

    def _abandon(self, generation: ActiveGeneration) -> None:
        """Cancel a fetch that is no longer needed and notify the prefill worker."""
        fetch = generation.fetch
        if fetch is not None and self._puller is not None and not fetch.is_abandoned:
            fetch.is_abandoned = True
            self._puller.abandon(fetch)


def _rows_to_score(chunks: Items[Chunk], batch: Batch) -> list[ScoredRows]:
    """Return the rows of a step's batch that score prompt tokens."""
    found: list[ScoredRows] = []
    for chunk, span in zip(chunks, batch.spans, strict=True):
        positions = chunk.sequence.rows_to_score(chunk.count)
        if positions:
            first = span.row + positions.start - chunk.sequence.computed
            found.append(ScoredRows(chunk.sequence, positions, np.arange(first, first + len(positions), dtype=np.intp)))
    return found


def _with_rows(batch: Batch, scored: Items[ScoredRows]) -> Batch:
    """Return the batch with the scored rows among those that are wanted, behind the others."""
    return replace(batch, wanted=np.concatenate([batch.wanted, *(one.rows for one in scored)])) if scored else batch


def _in_rows(chunks: list[Chunk]) -> list[Chunk]:
    """Return the chunks with single tokens first, ordered by context, as the model requires."""
    return sorted(chunks, key=lambda chunk: (chunk.count > 1, chunk.sequence.computed))


def _passed(chunks: Items[Chunk], waiting: Iterable[TokenSequence]) -> ForwardPass:
    """Return the measurements of a step and of the waiting sequences."""
    prompts, cached, computed, contexts = Tally(), 0, 0, Tally()
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.computed < sequence.prompt_tokens or sequence.pending > 1:
            prompts.add(len(sequence.tokens))
            cached += sequence.computed
            computed += chunk.count
        else:
            contexts.add(len(sequence.tokens))
    queued, preempted = Tally(), Tally()
    for sequence in waiting:
        is_answered = len(sequence.tokens) > sequence.prompt_tokens
        (preempted if is_answered else queued).add(len(sequence.tokens))
    return ForwardPass(
        0.0,
        ScheduledRequests(
            prompts.count, computed, prompts.variance, cached, contexts.count, contexts.total, contexts.variance
        ),
        QueuedRequests(
            queued.count, queued.total, queued.variance, preempted.count, preempted.total, preempted.variance
        ),
    )


def _batch(chunks: Items[Chunk], ending: Items[bool], block_tokens: int) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[TokenSpan] = []
    wanted: list[int] = []
    adapted: dict[Adapter, list[int]] = {}
    for chunk, is_last in zip(chunks, ending, strict=True):
        sequence, first = chunk.sequence, chunk.sequence.computed
        end = first + chunk.count
        spans.append(TokenSpan(len(tokens), chunk.count, end, sequence.visible_runs(end)))
        if sequence.adapter is not None:
            adapted.setdefault(sequence.adapter, []).extend(range(len(tokens), len(tokens) + chunk.count))
        tokens += sequence.tokens[first:end]
        positions += range(first, end)
        blocks = sequence.blocks
        slots += [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(first, end)]
        if is_last:
            wanted.append(len(tokens) - 1)
    arrays = [np.array(values, dtype=np.intp) for values in (tokens, positions, slots, wanted)]
    rows = [Adapted(adapter, rows_of(found)) for adapter, found in adapted.items()]
    return Batch(arrays[0], arrays[1], arrays[2], spans, arrays[3], rows)
