"""Controls: engine routes for sleep, profiling, aborts and weight updates (docs/engine-control.md)."""

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
from dynamo.core.boundaries import Rollback
from dynamo.core.errors import InvalidArgument
from dynamo.cpu.adapters import Adapters
from dynamo.cpu.architecture import Architecture
from dynamo.cpu.config import CpuConfig
from dynamo.cpu.core import Core
from dynamo.cpu.layout import fingerprint
from dynamo.cpu.model import TransformerWeights, load_weights
from dynamo.cpu.trace import StepTrace

WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)
VERSION = "default"
"""Version of weights that were loaded without a version name."""


class Stepping(Protocol):
    """Engine interface that the controls use."""

    trace: StepTrace | None
    is_asleep: bool

    @property
    def core(self) -> Core:
        """Return the core; use it only inside `between_steps`."""

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine's thread between two steps. Raise the exception of `work`."""

    def abort(self, request_id: str) -> None:
        """Abort a request."""


class CpuControls:
    """Control routes of one engine and their implementation."""

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
        """Return the routes by their upstream names."""
        offered = ProfileControls(self).routes()
        if self._config.role is DisaggregationMode.AGGREGATED:  # In other modes other workers read the cache in place.
            offered |= SleepControls(self, self._host).routes()
        if self._config.enable_rl:
            offered |= TrainerControls(self).routes()
        return self._panel.guarded(offered)

    def endpoints(self) -> dict[str, Work]:
        """Return the operations served over the request plane."""
        return self._panel.guarded(CacheControls(self).endpoints())

    async def sleep(self, level: int) -> None:
        """Free the weights and the cache, at any level: both are restored from the checkpoint and from prompts."""
        self._engine.is_asleep = True
        with Rollback(self._wake):
            await self._engine.between_steps(self._forget)
        self._asleep = set(PARTS)
        await asyncio.to_thread(memory.trim_memory)

    def _wake(self) -> None:
        self._engine.is_asleep = False

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Restore parts of the engine; return True if it is completely awake. Raise `InvalidArgument`."""
        wanted = PARTS if tags is None else tags
        unknown = [str(tag) for tag in wanted if tag not in PARTS] if isinstance(wanted, list | tuple) else [str(tags)]
        if unknown:
            raise InvalidArgument(f"tags {', '.join(unknown)}: allowed values: {', '.join(PARTS)}")
        if WEIGHTS in wanted and WEIGHTS in self._asleep:
            weights = await asyncio.to_thread(load_weights, self._path, self._shape)
            await self._engine.between_steps(partial(self._exchange, weights, await self._fingerprint(self._path)))
        self._asleep -= set(wanted)
        self._engine.is_asleep = bool(self._asleep)
        return not self._asleep

    async def start_profile(self, prefix: str | None) -> None:
        if self._engine.trace is not None:
            raise InvalidArgument("a profile is already running")
        self._engine.trace = StepTrace(None if prefix is None else str(prefix))

    async def stop_profile(self) -> str:
        trace, self._engine.trace = self._engine.trace, None
        if trace is None:
            raise InvalidArgument("no profile is running")
        await self._engine.between_steps(lambda: None)  # The last step that records into the profile is finished.
        return await asyncio.to_thread(trace.write, self._config.profile_dir or tempfile.gettempdir())

    async def reset_prefix_cache(self) -> bool:
        await self._engine.between_steps(self._engine.core.clear)
        return True

    async def check_health(self) -> None:
        await self._engine.between_steps(lambda: None)

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def update_weights(self, path: str, version: str | None) -> None:
        """Load weights of the same model from a directory; requests are rejected during the replacement."""
        if self._config.role is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument("weight updates are not supported for disaggregated workers")
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
        await asyncio.to_thread(memory.trim_memory)

    async def get_weight_version(self) -> str:
        return self._version

    async def update_weight_version(self, version: str) -> None:
        self._version = version

    async def _fingerprint(self, path: str) -> str | None:
        """Return the fingerprint that identifies blocks of these weights in the tiers; None without tiers."""
        return await asyncio.to_thread(fingerprint, path) if self._has_tiers else None

    def _exchange(self, weights: TransformerWeights, identity: str | None) -> None:
        """Replace the weights. The tiers keep blocks of the same weights, so that a wake-up finds them again."""
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
    """Return the absolute path of a directory and the architecture of its model. Raise `ConfigError`."""
    return os.path.abspath(path), Architecture.read(path)
