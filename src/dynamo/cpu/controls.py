"""Controls: what the embedded engine can be told beside answering (docs/engine-control.md)."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dynamo.backend.controls import (
    CacheControls,
    Panel,
    ProfileControls,
    SleepControls,
    TrainerControls,
    Work,
    out_of_service,
)
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.engine import EngineHost
from dynamo.core import memory
from dynamo.core.errors import InvalidArgument
from dynamo.cpu.adapters import Adapters
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.core import Core
from dynamo.cpu.layout import fingerprint
from dynamo.cpu.model import Weights, load_weights
from dynamo.cpu.trace import StepTrace

WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)
VERSION = "default"
"""What weights are called that nobody gave a name."""


class Stepping(Protocol):
    """What the controls need of the engine."""

    trace: StepTrace | None
    is_asleep: bool

    @property
    def core(self) -> Core:
        """For what is done in `between_steps`."""

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Has something done by the engine's thread while it computes nothing. Raises what `work` raises."""

    def abort(self, request_id: str) -> None:
        """Ends a request."""


class Controls:
    """The routes of one engine, and what they do to it."""

    def __init__(
        self, engine: Stepping, host: EngineHost, config: CpuConfig, adapters: Adapters, *, has_tiers: bool
    ) -> None:
        self._engine = engine
        self._host = host
        self._config = config
        self._adapters = adapters
        self._has_tiers = has_tiers
        self._shape = engine.core.model.shape
        self._path = config.directory
        self._version = VERSION
        self._asleep: set[str] = set()
        self._panel = Panel()

    def routes(self) -> dict[str, Work]:
        """By the names under which upstream has them."""
        offered = ProfileControls(self).routes()
        if self._config.role is DisaggregationMode.AGGREGATED:  # Elsewhere others read its cache where it lies.
            offered |= SleepControls(self, self._host).routes()
        if self._config.enable_rl:
            offered |= TrainerControls(self).routes()
        return self._panel.guarded(offered)

    def endpoints(self) -> dict[str, Work]:
        """What is asked over the request plane."""
        return self._panel.guarded(CacheControls(self).endpoints())

    async def sleep(self, level: int) -> None:
        """Gives the weights and the cache back, at any level: both are had again from the checkpoint and from prompts."""
        self._engine.is_asleep = True
        try:
            await self._engine.between_steps(self._forget)
        except BaseException:
            self._engine.is_asleep = False
            raise
        self._asleep = set(PARTS)
        await asyncio.to_thread(memory.give_back)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """True when it is awake as a whole. Raises `InvalidArgument`."""
        wanted = PARTS if tags is None else tags
        unknown = [str(tag) for tag in wanted if tag not in PARTS] if isinstance(wanted, list | tuple) else [str(tags)]
        if unknown:
            raise InvalidArgument(f"tags {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
        if WEIGHTS in wanted and WEIGHTS in self._asleep:
            weights = await asyncio.to_thread(load_weights, self._path, self._shape)
            await self._engine.between_steps(partial(self._exchange, weights, await self._fingerprint(self._path)))
        self._asleep -= set(wanted)
        self._engine.is_asleep = bool(self._asleep)
        return not self._asleep

    async def start_profile(self, prefix: str | None) -> None:
        if self._engine.trace is not None:
            raise InvalidArgument("a profile is being made already")
        self._engine.trace = StepTrace(None if prefix is None else str(prefix))

    async def stop_profile(self) -> str:
        trace, self._engine.trace = self._engine.trace, None
        if trace is None:
            raise InvalidArgument("no profile is being made")
        await self._engine.between_steps(lambda: None)  # The step that still knew of it is over.
        return await asyncio.to_thread(trace.write, self._config.profile_dir or tempfile.gettempdir())

    async def reset_prefix_cache(self) -> bool:
        await self._engine.between_steps(self._engine.core.clear)
        return True

    async def check_health(self) -> None:
        await self._engine.between_steps(lambda: None)

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def update_weights(self, path: str, version: str | None) -> None:
        """Of the same model, from a directory: out of service for the moment of the exchange."""
        if self._config.role is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument("new weights are not supported where KV blocks change hands: disaggregated")
        path, shape = await asyncio.to_thread(_read, path)
        if shape != self._shape:
            raise InvalidArgument(f"{path}: config.json describes another model")
        async with self._adapters.exchanging:
            adapters = await self._adapters.reread(path)
            weights = None if WEIGHTS in self._asleep else await asyncio.to_thread(load_weights, path, self._shape)
            is_serving = not self._asleep
            if is_serving:
                await out_of_service(self._host)
            try:
                if weights is not None:
                    await self._engine.between_steps(partial(self._exchange, weights, await self._fingerprint(path)))
                self._adapters.rebase(path, adapters)
                self._path = path
                self._version = self._version if version is None else version
            finally:
                if is_serving:
                    await self._host.return_to_service()
        del weights
        await asyncio.to_thread(memory.give_back)

    async def get_weight_version(self) -> str:
        return self._version

    async def update_weight_version(self, version: str) -> None:
        self._version = version

    async def _fingerprint(self, path: str) -> str | None:
        """By which tiers know blocks of these weights; None where nobody asks."""
        return await asyncio.to_thread(fingerprint, path) if self._has_tiers else None

    def _exchange(self, weights: Weights, identity: str | None) -> None:
        """With tiers, those of the same weights stay: a wake-up finds what was known before."""
        core = self._engine.core
        core.model.load(weights)
        if identity is None:
            core.clear()
        else:
            core.reidentify(identity)

    def _forget(self) -> None:
        core = self._engine.core
        core.forget_cache()
        core.model.unload()


def _read(path: str) -> tuple[str, Architecture]:
    """A directory by its full name, and the model in it. Raises `ConfigError`."""
    return os.path.abspath(path), Architecture.read(path)
