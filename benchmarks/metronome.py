"""Metronome: an engine that writes a token to each of its streams at fixed intervals, and records the times.

    python benchmarks/metronome.py --model-path DIRECTORY --interval-ms 20 [--phases 8] [--beats FILE]
    python benchmarks/metronome.py --model-path DIRECTORY --answer-after-ms 60

It is the backend of both frontends where a frontend's effect on the token pace is measured: its clock is
`time.perf_counter`, which on Linux is the same in every process. With phases it acts as that many engines, with ticks
in sequence, each with its share of the streams. With `--answer-after-ms` each request is answered as a whole after that
time.
"""

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dynamo.backend.command import run
from dynamo.backend.config import WorkerOptions
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.config import option
from dynamo.core.errors import ConfigError, EngineShutdown
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply

CONTEXT_LENGTH = 65536
TOKENS_DEFAULT = 128
BEAT = struct.Struct("=ddII")


@dataclass(frozen=True, slots=True)
class Beat:
    """One tick: when it was due, when its tokens had been written, its phase, and its number of streams."""

    due_s: float
    written_s: float
    phase: int
    streams: int


def read_beats(path: str) -> Iterator[Beat]:
    """Return the ticks so far, in order."""
    with open(path, "rb") as file:
        data = file.read()
    for fields in BEAT.iter_unpack(data[: len(data) - len(data) % BEAT.size]):
        yield Beat(*fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetronomeOptions(WorkerOptions):
    """Engine with a fixed token interval."""

    model_path: str = option("", "--model-path", None, "Whose tokenizer to use: a directory")
    model_name: str = option("bench", "--model-name", None, "Name to serve under")
    interval_ms: float = option(20.0, "--interval-ms", None, "Between two tokens of a stream")
    phases: int = option(1, "--phases", None, "So many engines, beating one after the other")
    answer_after_ms: float = option(0.0, "--answer-after-ms", None, "Answer each request whole after so long; 0: beat")
    beats: str = option("", "--beats", None, "File to write the beats to")
    context_length: int = option(CONTEXT_LENGTH, "--context-length", None, "Maximum of prompt and answer in tokens")

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        if not os.path.isdir(self.model_path):
            raise ConfigError(f"--model-path {self.model_path!r}: expected a directory")
        if self.interval_ms <= 0 or self.phases < 1:
            raise ConfigError("--interval-ms and --phases: expected more than zero")


class Stream:
    """Request in flight: its next token and its remaining tokens."""

    __slots__ = ("left", "prompt_tokens", "token", "total")

    def __init__(self, request: PreprocessedRequest) -> None:
        self.prompt_tokens = len(request.token_ids)
        self.token = request.token_ids[self.prompt_tokens // 2]  # Token of ordinary text, not a special one.
        self.total = self.left = request.stop_conditions.max_tokens or TOKENS_DEFAULT

    def last(self, tokens: list[int]) -> EngineOutput:
        usage = CompletionUsage(self.prompt_tokens, self.total, self.prompt_tokens + self.total)
        return EngineOutput(tokens, 0, finish_reason="length", completion_usage=usage)


class Metronome:
    """`LLMEngine` with a fixed token interval."""

    def __init__(self, options: MetronomeOptions) -> None:
        self._options = options
        self._is_running = False
        self._phases: list[dict[Reply, Stream]] = [{} for _ in range(options.phases)]
        self._waiting: dict[Reply, asyncio.TimerHandle] = {}
        self._timers: list[asyncio.TimerHandle | None] = [None] * options.phases
        self._beats = -1
        self._quiet = asyncio.Event()

    @classmethod
    def from_options(cls, options: MetronomeOptions) -> "Metronome":
        return cls(options)

    async def start(self, host: EngineHost) -> EngineConfig:
        if self._options.beats:
            self._beats = os.open(self._options.beats, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._is_running = True
        return EngineConfig(
            model_path=self._options.model_path,
            served_model_name=self._options.model_name,
            context_length=self._options.context_length,
            kv_cache_block_size=16,
            total_kv_blocks=1_000_000,
            max_num_seqs=16384,
            max_num_batched_tokens=CONTEXT_LENGTH,
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if not self._is_running:
            raise EngineShutdown("the engine is not running")
        stream = Stream(request)
        if self._options.answer_after_ms:
            loop = asyncio.get_running_loop()
            self._waiting[reply] = loop.call_later(self._options.answer_after_ms / 1e3, self._answer, reply, stream)
            return
        phase = min(range(len(self._phases)), key=lambda each: len(self._phases[each]))
        self._phases[phase][reply] = stream
        if self._timers[phase] is None:
            self._schedule(phase, 0.0)

    def cancel(self, reply: Reply) -> None:
        timer = self._waiting.pop(reply, None)
        if timer is not None:
            timer.cancel()
        for phase in self._phases:
            phase.pop(reply, None)
        self._check_quiet()

    async def drain(self) -> None:
        if self._waiting or any(self._phases):
            self._quiet.clear()
            await self._quiet.wait()

    async def stop(self) -> None:
        self._is_running = False
        for timer in (*self._timers, *self._waiting.values()):
            if timer is not None:
                timer.cancel()
        self._waiting.clear()
        if self._beats >= 0:
            os.close(self._beats)
            self._beats = -1

    def _answer(self, reply: Reply, stream: Stream) -> None:
        del self._waiting[reply]
        reply.item(stream.last([stream.token] * stream.total))
        reply.finish()
        self._check_quiet()

    def _check_quiet(self) -> None:
        if not (self._waiting or any(self._phases)):
            self._quiet.set()

    def _schedule(self, phase: int, after: float) -> None:
        """Schedule the next tick of a phase on the common grid; missed ticks are skipped."""
        now = time.perf_counter()
        due = next_beat(max(now, after), self._options.interval_ms / 1e3, phase, len(self._phases))
        self._timers[phase] = asyncio.get_running_loop().call_later(due - now, self._beat, phase, due)

    def _beat(self, phase: int, due: float) -> None:
        streams = self._phases[phase]
        ended = []
        for reply, stream in streams.items():
            stream.left -= 1
            if stream.left:
                reply.token(stream.token)
            else:
                reply.item(stream.last([stream.token]))
                reply.finish()
                ended.append(reply)
        now = time.perf_counter()
        if self._beats >= 0:
            os.write(self._beats, BEAT.pack(due, now, phase, len(streams)))
        for reply in ended:
            del streams[reply]
        self._timers[phase] = None
        if ended:
            self._check_quiet()
        if streams and self._is_running:
            self._schedule(phase, due + self._options.interval_ms / 2e3)  # A timer may be early.


def next_beat(now: float, interval_s: float, phase: int, phases: int) -> float:
    """Return the first instant after `now` at which that phase has a tick."""
    offset = interval_s * phase / phases
    return ((now - offset) // interval_s + 1) * interval_s + offset


if __name__ == "__main__":
    run(Metronome, MetronomeOptions)
