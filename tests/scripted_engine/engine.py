"""ScriptedEngine: an engine that generates the script of each request, in tokens of a real tokenizer.

It is also a command: `python -m tests.scripted_engine.engine --model-path DIRECTORY`, run from the repository's root.
"""

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.scripted_engine.script import Script, pieces, script_of

from dynamo.backend.command import run
from dynamo.backend.config import WorkerOptions
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core import errors
from dynamo.core.config import option
from dynamo.core.errors import ConfigError, EngineShutdown
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
    TopLogprob,
)
from dynamo.runtime.request_plane.base import Reply
from dynamo.text.tokenizer.tokenizer import Tokenizer

CONTEXT_LENGTH = 2048
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOptions(WorkerOptions):
    """Options of a worker that generates scripted text."""

    model_path: str | None = option(None, "--model-path", None, "Whose tokenizer to use")
    model_name: str = option("scripted", "--model-name", None, "Name to serve under")

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        if self.model_path is None:
            raise ConfigError("--model-path is missing")


@cache
def tokenizer_of(model_path: str) -> Tokenizer:
    """Return the tokenizer of a model, which is read once for all engines of a process."""
    return Tokenizer.from_dir(model_path)


class ScriptedEngine:
    """`LLMEngine` whose requests contain their responses; each step sends one message of every request."""

    def __init__(self, model_path: str, name: str = "scripted") -> None:
        self._model_path = model_path
        self._name = name
        self._tokenizer = tokenizer_of(model_path)
        self._running: dict[Reply, Iterator[Any]] = {}
        self._is_open = False
        self._is_stepping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.requests: deque[PreprocessedRequest] = deque(maxlen=1000)
        """Newest requests, for tests in the same process."""
        self.request_arrived = asyncio.Event()
        """Set when a request arrives."""
        self.cancelled = asyncio.Event()
        """Set when a request is cancelled."""

    @classmethod
    def from_options(cls, options: ScriptedOptions) -> "ScriptedEngine":
        assert options.model_path is not None, "the options were judged"
        return cls(options.model_path, options.model_name)

    async def start(self, host: EngineHost) -> EngineConfig:
        self._is_open = True
        return EngineConfig(
            model_path=self._model_path,
            served_model_name=self._name,
            context_length=CONTEXT_LENGTH,
            kv_cache_block_size=16,
            total_kv_blocks=1024,
            max_num_seqs=256,
            max_num_batched_tokens=CONTEXT_LENGTH,
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if not self._is_open:
            raise EngineShutdown("the engine is not running")
        self.requests.append(request)
        self.request_arrived.set()
        self._running[reply] = self._emit(request, reply)
        self._idle.clear()
        self._schedule()

    def cancel(self, reply: Reply) -> None:
        self._running.pop(reply, None)
        self.cancelled.set()

    async def drain(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        self._is_open = False
        self._running.clear()
        self._idle.set()

    def _schedule(self) -> None:
        if not self._is_stepping and self._running:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_stepping = False
        for reply, steps in list(self._running.items()):
            if next(steps, None) is None:
                self._running.pop(reply, None)
        if not self._running:
            self._idle.set()
        self._schedule()

    def _emit(self, request: PreprocessedRequest, reply: Reply) -> Iterator[int]:
        """Send all messages of a script; yield the number of tokens so far after each one."""
        script = script_of(request.annotations)
        printed = 0
        choices = [self._tokens(script, index) for index in range(max(len(script.texts), len(script.ids)))]
        limit = request.stop_conditions.max_tokens
        for index, tokens in enumerate(choices):
            kept = tokens if limit is None else tokens[:limit]
            reason = script.finish_reason if len(kept) == len(tokens) else "length"
            for message in self._messages(script, request, index, kept):
                if index == 0 and script.fails_after is not None and printed >= script.fails_after:
                    _fail(reply, getattr(errors, script.fails_as)("the script says so"), script)
                    return
                self._write(reply, message, len(choices) > 1)
                printed += len(message.token_ids)
                yield printed
            self._end(script, request, reply, index, reason, len(kept))
        reply.finish()

    def _tokens(self, script: Script, index: int) -> list[int]:
        if index < len(script.ids):
            return script.ids[index]
        return [
            token_id for piece in pieces(script.texts[index], script.cuts) for token_id in self._tokenizer.encode(piece)
        ]

    def _messages(
        self, script: Script, request: PreprocessedRequest, index: int, tokens: list[int]
    ) -> Iterator[EngineOutput]:
        place = turn = 0
        wanted = request.output_options.logprobs
        while place < len(tokens):
            size = max(1, script.sizes[turn % len(script.sizes)])
            ids = tokens[place : place + size]
            output = EngineOutput(ids, index)
            if wanted is not None:
                output.log_probs = [-0.25 for _ in ids]
                output.top_logprobs = [
                    [TopLogprob(rank + 1, (one + rank) % 256, logprob=-0.25 - rank) for rank in range(wanted)]
                    for one in ids
                ]
            yield output
            place, turn = place + size, turn + 1

    def _write(self, reply: Reply, output: EngineOutput, has_several: bool) -> None:
        """Send a bare token where the message has nothing else, as engines do."""
        if len(output.token_ids) == 1 and output.log_probs is None and not has_several:
            reply.token(output.token_ids[0])
        else:
            reply.item(output)

    def _end(
        self, script: Script, request: PreprocessedRequest, reply: Reply, index: int, reason: str, tokens: int
    ) -> None:
        last = EngineOutput([], index, finish_reason=reason, stop_reason=script.stop_reason)
        if index < len(script.scores):
            last.cum_log_probs = script.scores[index]
        if script.counts:
            prompt = len(request.token_ids)
            last.completion_usage = CompletionUsage(prompt, tokens, prompt + tokens)
            if script.cached is not None:
                last.completion_usage.prompt_tokens_details = PromptTokensDetails(script.cached)
        if script.engine_data is not None and index == 0:
            last.engine_data = script.engine_data
        reply.item(last)


def _fail(reply: Reply, error: Exception, script: Script) -> None:
    """End a response with an error at the time that the script names."""
    loop = asyncio.get_running_loop()
    if script.fails_when and not os.path.exists(script.fails_when):
        loop.call_later(POLL_S, _fail, reply, error, script)
    else:
        reply.fail(error)


if __name__ == "__main__":
    run(ScriptedEngine, ScriptedOptions)
