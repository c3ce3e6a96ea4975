"""Running deployment: address, model and cache of the engine that is measured."""

import contextlib
import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from dynamo.core.errors import DynamoException
from dynamo.profiler.search import EngineChoice
from dynamo.replay.event_stream import EventStream

REQUEST_TIMEOUT_S = 1800.0
KV_METRICS = ("dynamo_frontend_model_total_kv_blocks", "dynamo_frontend_model_kv_cache_block_size")


class CannotDeploy(DynamoException):
    """The processes ended, or were not ready in time; the message has the cause."""


@dataclass(frozen=True, slots=True)
class RunningDeployment:
    """A frontend with one worker."""

    stream: EventStream
    url: str
    model: str
    kv_blocks: int
    """Blocks of the worker's cache; 0 if it does not report them."""
    block_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the cache has room for; 0 if it is not known."""
        return self.kv_blocks * self.block_tokens

    def sequences(self, tokens: int) -> int | None:
        """Return how many sequences of `tokens` the cache has room for, in whole blocks; None if it is not known."""
        return sequences_in(self.kv_blocks, self.block_tokens, tokens)


def sequences_in(kv_blocks: int, block_tokens: int, tokens: int) -> int | None:
    """Return how many sequences of `tokens` a cache has room for, in whole blocks; None if its size is not known."""
    return kv_blocks // -(-(tokens + 1) // block_tokens) if kv_blocks * block_tokens else None


class Deployer(Protocol):
    """Deploys the candidates of a sweep one after another."""

    @property
    def is_single(self) -> bool:
        """Return whether there is one candidate only, whatever parallelizations fit."""
        ...

    def deployed(self, choice: EngineChoice, directory: Path) -> AbstractAsyncContextManager[RunningDeployment]:
        """Deploy an engine during the block, with logs in `directory`. Raise `CannotDeploy` if it does not serve."""
        ...


async def served_model(stream: EventStream) -> str | None:
    """Return the name of the model that a frontend serves; None while it serves none."""
    with contextlib.suppress(DynamoException, msgspec.DecodeError):
        listed = msgspec.json.decode(await stream.get("/v1/models"))
        names = [str(one["id"]) for one in listed.get("data", [])]
        return names[0] if names else None
    return None


async def described(stream: EventStream, url: str, model: str) -> RunningDeployment:
    """Return a deployment that serves, with the cache that its worker reports."""
    text = (await stream.get("/metrics")).decode("utf-8", "replace")
    blocks, tokens = (
        max(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)), default=0.0)
        for name in KV_METRICS
    )
    return RunningDeployment(stream, url, model, int(blocks), int(tokens))


def last_line(path: Path) -> str:
    """Return the last line of a log that has words, without the frame that some programs draw."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    words = (line.strip(" \t│|") for line in reversed(lines) if any(map(str.isalnum, line)))
    return next(words, "no output")
