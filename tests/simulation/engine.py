"""SimEngine: an engine in which each token is a pure function of the previous tokens, and whose faults are drawn.

Any worker continues any text in the same way, so a text that migrated between workers is verified by generating it
again.
"""

import asyncio
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dynamo.cpu
from dynamo.backend.disagg import DisaggregationMode, prefill_output, prefill_request, prefill_source_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.errors import EngineShutdown
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PrefillResult, PreprocessedRequest
from dynamo.protocols.load import WorkerLoad
from dynamo.routing.prefill_plan import LOCAL_PREFILL
from dynamo.runtime.request_plane.base import Reply
from dynamo.text.detokenizer import TokenTable

MODEL_DIR = os.path.join(os.path.dirname(dynamo.cpu.__file__), "demo_model")
CONTEXT_LENGTH = 512
BLOCKS = 64
BLOCK_TOKENS = 16
EOS_ODDS = 23  # Average length of a text in tokens, which an end token ends.
LONG_ODDS = 0.3  # Share of prefills that take several chunks.
CHUNKS_MAX = 5
CHUNK_S = 0.5
LONG_PREFILL_S = 1.5 * CHUNK_S * CHUNKS_MAX
BROKEN_ODDS = 11  # One token in this many is half a character.


class Language:
    """Deterministic token model."""

    def __init__(self, table: TokenTable, eos: int) -> None:
        self.table = table
        self.eos = eos
        whole = [i for i, raw in enumerate(table.raw) if raw.isascii() and raw.isalnum() and len(raw) > 1]
        half_characters = [i for i, raw in enumerate(table.raw) if raw and max(raw) > 127]
        self._words = whole
        self._half_characters = half_characters

    @staticmethod
    def state(tokens: Sequence[int], index: int = 0) -> int:
        state = index
        for token in tokens:
            state = zlib.crc32(token.to_bytes(4, "little"), state)
        return state

    def next(self, state: int, *, may_end: bool) -> int:
        """Return the token after a text with this state."""
        if may_end and state % EOS_ODDS == 0:
            return self.eos
        if self._half_characters and state % BROKEN_ODDS == 0:
            return self._half_characters[(state >> 8) % len(self._half_characters)]
        return self._words[(state >> 4) % len(self._words)]

    def generate_all(self, prompt: Sequence[int], limit: int, min_tokens: int = 0, index: int = 0) -> list[int]:
        """Return all tokens that follow a prompt, including the end token."""
        state = self.state(prompt, index)
        generated: list[int] = []
        while len(generated) < limit:
            token = self.next(state, may_end=len(generated) >= min_tokens)
            generated.append(token)
            if token == self.eos:
                break
            state = zlib.crc32(token.to_bytes(4, "little"), state)
        return generated

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.table.raw[token] for token in tokens if token != self.eos).decode("utf-8", "replace")


@dataclass(frozen=True)
class EngineBehavior:
    """Timing and faults of one engine."""

    gap_s: float = 0.02
    batch_max: int = 1
    """Maximum number of tokens of one step."""
    is_bare: bool = False
    """Whether the tokens of a step are sent one by one."""
    stall: float = 0.0
    """Share of steps after which the engine stalls for `stall_s`."""
    stall_s: float = 3.0


@dataclass
class Run:
    """One choice of one request."""

    reply: Reply
    index: int
    state: int
    limit: int
    min_tokens: int
    prompt_tokens: int
    siblings: list["Run"]
    promise: dict[str, int] | None = None
    """Result that a prefill transfers to a decode worker."""
    chunks: int = 0
    """Remaining chunks of a prefill's prompt."""
    generated: int = 0
    is_over: bool = False
    timer: asyncio.TimerHandle | None = None


OnTokenGenerated = Callable[[str], None]
"""Called with the request id for each generated token."""


class SimEngine:
    """An `LLMEngine`."""

    def __init__(
        self,
        language: Language,
        name: str,
        behavior: EngineBehavior,
        rng: random.Random,
        on_token_generated: OnTokenGenerated,
        *,
        role: DisaggregationMode = DisaggregationMode.AGGREGATED,
        meets: bool = False,
        prefills_locally: bool = False,
    ) -> None:
        self._role = role
        self._meets = meets
        self._prefills_locally = prefills_locally
        self.runs: dict[Reply, list[Run]] = {}
        self.is_stuck = False
        self.is_healed = False
        self._language = language
        self._name = name
        self._behavior = behavior
        self._rng = rng
        self._on_token_generated = on_token_generated
        self._host: EngineHost | None = None

    async def start(self, host: EngineHost) -> EngineConfig:
        await asyncio.sleep(self._rng.uniform(0.01, 0.5))
        self._host = host
        return EngineConfig(
            model_path=MODEL_DIR,
            served_model_name=self._name,
            context_length=CONTEXT_LENGTH,
            kv_cache_block_size=BLOCK_TOKENS,
            total_kv_blocks=BLOCKS,
            max_num_seqs=64,
            max_num_batched_tokens=CONTEXT_LENGTH,
            bootstrap_host="meeting" if self._meets else None,
            bootstrap_port=7 if self._meets else None,
            runtime_data={LOCAL_PREFILL: True} if self._prefills_locally else {},
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self._host is None:
            raise EngineShutdown("the engine is not running")
        runs: list[Run] = []
        prompt = request.token_ids
        promise: dict[str, int] | None = None
        if self._role is DisaggregationMode.PREFILL:
            request = prefill_request(request)
            promise = {"state": Language.state(prompt)}
        elif self._role is DisaggregationMode.DECODE:
            phase = prefill_source_of(request)
            if isinstance(phase, PrefillResult):
                assert phase.disaggregated_params == {"state": Language.state(prompt)}, "the blocks of another prompt"
            elif phase is None:
                assert self._prefills_locally, "no worker computed the prompt"
        stop = request.stop_conditions
        limit = stop.max_tokens if stop.max_tokens is not None else CONTEXT_LENGTH - len(prompt)
        for index in range(request.sampling_options.n or 1):
            state = Language.state(prompt, index)
            chunks = self._rng.randint(1, CHUNKS_MAX) if promise is not None and self._rng.random() < LONG_ODDS else 0
            runs.append(Run(reply, index, state, limit, stop.min_tokens or 0, len(prompt), runs, promise, chunks))
        self.runs[reply] = runs
        for run in runs:
            self._schedule(run)
        self._publish_load()

    def cancel(self, reply: Reply) -> None:
        for run in self.runs.pop(reply, ()):
            run.is_over = True
            if run.timer is not None:
                run.timer.cancel()
        self._publish_load()

    async def drain(self) -> None:
        while self.runs:  # noqa: ASYNC110 - a delay does not matter here
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._host = None
        for reply in list(self.runs):
            self.cancel(reply)

    def die(self) -> None:
        """Fail permanently and report the failure."""
        for runs in self.runs.values():
            for run in runs:
                if run.timer is not None:
                    run.timer.cancel()
        if self._host is not None:
            self._host.fail(RuntimeError("the scripted engine broke"))

    def reconnect(self) -> None:
        """Stop injecting stalls."""
        self.is_healed = True
        self.unblock()

    def unblock(self) -> None:
        """Resume a stuck engine."""
        self.is_stuck = False
        for runs in self.runs.values():
            for run in runs:
                if not run.is_over and run.timer is None:
                    self._schedule(run)

    def _schedule(self, run: Run) -> None:
        behavior = self._behavior
        delay_s = (CHUNK_S if run.chunks else behavior.gap_s) * (0.5 + self._rng.random())
        if behavior.stall and not self.is_healed and self._rng.random() < behavior.stall:
            delay_s += self._rng.uniform(0.0, behavior.stall_s)
        run.timer = asyncio.get_running_loop().call_later(delay_s, self._step, run)

    def _step(self, run: Run) -> None:
        run.timer = None
        if self.is_stuck or run.is_over:
            return
        if run.chunks:
            run.chunks -= 1
            self._on_token_generated(run.reply.request_id)
            self._schedule(run)
            return
        tokens: list[int] = []
        for _ in range(self._rng.randint(1, self._behavior.batch_max)):
            token = self._language.next(run.state, may_end=run.generated >= run.min_tokens)
            tokens.append(token)
            run.generated += 1
            if token == self._language.eos or run.generated >= run.limit:
                self._on_token_generated(run.reply.request_id)
                self._finish(run, tokens)
                return
            run.state = zlib.crc32(token.to_bytes(4, "little"), run.state)
        self._on_token_generated(run.reply.request_id)
        if len(run.siblings) == 1 and (len(tokens) == 1 or self._behavior.is_bare):
            for token in tokens:
                run.reply.token(token)
        else:
            run.reply.item(EngineOutput(tokens, run.index))
        if not run.is_over:
            self._schedule(run)

    def _finish(self, run: Run, tokens: list[int]) -> None:
        run.is_over = True
        is_last = all(one.is_over for one in run.siblings)
        reason = "eos" if tokens[-1] == self._language.eos else "length"
        usage = CompletionUsage(run.prompt_tokens, run.generated, run.prompt_tokens + run.generated)
        if run.promise is not None:
            run.reply.item(prefill_output(tokens, run.promise, usage))
        else:
            run.reply.item(EngineOutput(tokens, run.index, finish_reason=reason, completion_usage=usage))
        if is_last:
            self.runs.pop(run.reply, None)
            run.reply.finish()
            self._publish_load()

    def _publish_load(self) -> None:
        if self._host is not None:
            used = min(BLOCKS, 8 * len(self.runs))
            load = WorkerLoad(
                active_decode_blocks=used, kv_used_blocks=used, kv_total_blocks=BLOCKS, running_requests=len(self.runs)
            )
            self._host.publish_load(load)
