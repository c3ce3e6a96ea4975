"""EchoEngine: a minimal engine that repeats the prompt, one token per step.

It is also a command, `python -m dynamo.backend.sample --model-path DIRECTORY`; it needs only the model's tokenizer.
"""

import asyncio
from dataclasses import dataclass
from itertools import islice

from dynamo.backend.command import run
from dynamo.backend.config import WorkerOptions
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.config import option
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument
from dynamo.model_card.hub import resolve_model
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest
from dynamo.protocols.load import WorkerLoad
from dynamo.runtime.request_plane.base import Reply

CONTEXT_LENGTH = 4096
BLOCK_TOKENS = 16
BLOCKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoOptions(WorkerOptions):
    """Options of a worker that repeats each prompt."""

    model_path: str | None = option(
        None, "--model-path", None, "Model whose tokenizer is used: a directory or a hub id"
    )
    model_name: str = option("echo", "--model-name", None, "Name to serve under")
    step_s: float = option(0.0, "--step-s", None, "Seconds per token")

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        if self.model_path is None:
            raise ConfigError("--model-path is required: a directory or a hub id")
        if self.step_s < 0:
            raise ConfigError(f"--step-s {self.step_s}: must be 0 or more")


class Echo:
    """One request: the tokens still to be sent."""

    def __init__(self, request: PreprocessedRequest) -> None:
        self.prompt_tokens = len(request.token_ids)
        self.tokens = list(islice(request.token_ids, request.stop_conditions.max_tokens))
        self.sent = 0


class EchoEngine:
    """An `LLMEngine` without a model; `step_s` is the duration of a step in seconds."""

    def __init__(self, model_path: str, name: str = "echo", step_s: float = 0.0) -> None:
        self._model_path = model_path
        self._name = name
        self._step_s = step_s
        self._host: EngineHost | None = None
        self._running: dict[Reply, Echo] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def from_options(cls, options: EchoOptions) -> "EchoEngine":
        assert options.model_path is not None, "checked by __post_init__"
        return cls(resolve_model(options.model_path, weights=False), options.model_name, options.step_s)

    async def start(self, host: EngineHost) -> EngineConfig:
        self._host = host
        return EngineConfig(
            model_path=self._model_path,
            served_model_name=self._name,
            context_length=CONTEXT_LENGTH,
            kv_cache_block_size=BLOCK_TOKENS,
            total_kv_blocks=BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=CONTEXT_LENGTH,
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self._host is None:
            raise EngineShutdown("the engine is not running")
        if not request.token_ids or len(request.token_ids) > CONTEXT_LENGTH:
            raise InvalidArgument(f"the prompt has {len(request.token_ids)} tokens, expected 1 to {CONTEXT_LENGTH}")
        echo = Echo(request)
        if not echo.tokens:
            raise InvalidArgument(f"max_tokens is {request.stop_conditions.max_tokens}, expected 1 or more")
        if request.output_options.prompt_logprobs is not None:
            raise InvalidArgument(
                "prompt_logprobs (required by echo with logprobs) is not supported by the sample engine",
                param="prompt_logprobs",
            )
        self._running[reply] = echo
        self._idle.clear()
        self._schedule()

    def cancel(self, reply: Reply) -> None:
        self._running.pop(reply, None)

    async def drain(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        self._host = None
        self._running.clear()
        self._idle.set()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._step)

    def _step(self) -> None:
        """Send one token to each request."""
        self._timer = None
        for reply, echo in list(self._running.items()):
            self._send(reply, echo)
        if self._host is not None:
            self._host.publish_load(WorkerLoad(kv_total_blocks=BLOCKS, running_requests=len(self._running)))
        if self._running:
            self._schedule()
        else:
            self._idle.set()

    def _send(self, reply: Reply, echo: Echo) -> None:
        token = echo.tokens[echo.sent]
        echo.sent += 1
        if echo.sent < len(echo.tokens):
            reply.token(token)
            return
        del self._running[reply]
        usage = CompletionUsage(echo.prompt_tokens, echo.sent, echo.prompt_tokens + echo.sent)
        reply.item(EngineOutput([token], 0, finish_reason="length", completion_usage=usage))
        reply.finish()


if __name__ == "__main__":
    run(EchoEngine, EchoOptions)
