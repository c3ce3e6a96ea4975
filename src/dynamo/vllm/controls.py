"""Controls: what the system port does to the engine, at `POST /engine/<name>` (serving-plane.md §5.2).

A worker whose engine sleeps is not found; woken whole, it is found again. An answer says `{"status": "ok"}`, or
`{"status": "error", "message": …}` for what the engine refuses.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.backend.engine import EngineHost
from dynamo.core.errors import InvalidArgument

logger = logging.getLogger(__name__)

SLEEP_LEVELS = (1, 2, 3)
DRAIN_S = 300.0  # For answers under way before the engine sleeps: the longest a client is promised.

Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Controls:
    """The routes of one engine."""

    def __init__(self, llm: Any, host: EngineHost, *, has_training: bool = False) -> None:
        """`llm` is vLLM's `AsyncLLM`; `has_training` offers what a trainer needs, too."""
        self._llm = llm
        self._host = host
        self._has_training = has_training
        self._one_at_a_time = asyncio.Lock()
        self._is_asleep = False

    def routes(self) -> dict[str, Work]:
        """By the names under which upstream has them."""
        found: dict[str, Work] = {
            "control/start_profile": self.start_profile,
            "control/stop_profile": self.stop_profile,
            "control/sleep": self.sleep,
            "control/wake_up": self.wake_up,
            "control/scale_elastic_ep": self.scale_elastic_ep,
        }
        if self._has_training:
            found |= {
                "liveness_probe": self.liveness_probe,
                "pause_generation": self.pause_generation,
                "resume_generation": self.resume_generation,
                "flush_cache": self.flush_cache,
                "abort_request": self.abort_request,
                "update_weights_from_disk": self.update_weights_from_disk,
                "get_weight_version": self.get_weight_version,
                "set_weight_version": self.set_weight_version,
            }
        return {name: self._guarded(name, work) for name, work in found.items()}

    def endpoints(self) -> dict[str, Work]:
        """What is asked over the request plane."""
        return {"clear_kv_blocks": self._guarded("clear_kv_blocks", self.clear_kv_blocks)}

    async def clear_kv_blocks(self, body: dict[str, Any]) -> dict[str, Any]:
        if not await self._llm.reset_prefix_cache():
            return {"status": "error", "message": "KV cache reset failed"}
        return {"status": "success", "message": "KV cache cleared"}

    async def sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        level = body.get("level", 1)
        if level not in SLEEP_LEVELS:
            raise InvalidArgument(f"level {level!r}: expected one of 1, 2, 3")
        if self._is_asleep:
            return {"status": "ok", "message": "Engine already asleep"}
        async with asyncio.timeout(DRAIN_S):
            await self._host.leave_service()
        try:
            await self._llm.sleep(level)
        except Exception:
            await self._host.return_to_service()
            raise
        self._is_asleep = True
        return {"status": "ok", "message": f"Engine slept (level={level})"}

    async def wake_up(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._is_asleep:
            return {"status": "ok", "message": "Engine already awake"}
        tags = body.get("tags")
        if await self._llm.wake_up(tags) is False:
            return {"status": "ok", "message": "Engine partly awake"}
        self._is_asleep = False
        await self._host.return_to_service()
        return {"status": "ok", "message": "Engine woke"}

    async def start_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._llm.start_profile(body.get("profile_prefix"))
        return {"status": "ok", "message": "Profiling started"}

    async def stop_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._llm.stop_profile()
        return {"status": "ok", "message": "Profiling stopped"}

    async def scale_elastic_ep(self, body: dict[str, Any]) -> dict[str, Any]:
        size = body.get("new_data_parallel_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidArgument(f"new_data_parallel_size {size!r}: expected a whole number above 0")
        await self._llm.scale_elastic_ep(size)
        return {"status": "ok", "message": f"Scaled to {size} data parallel ranks"}

    # For trainers.

    async def liveness_probe(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._llm.check_health()
        return {"status": "ok", "alive": True}

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise InvalidArgument(f"mode {mode!r}: expected abort, wait or keep")
        await self._llm.pause_generation(mode=mode, clear_cache=body.get("clear_cache", True))
        return {"status": "ok", "message": "Engine paused"}

    async def resume_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._llm.resume_generation()
        return {"status": "ok", "message": "Engine resumed"}

    async def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        if not await self._llm.reset_prefix_cache():
            raise InvalidArgument("the cache was not flushed: requests still use it")
        return {"status": "ok", "message": "Cache flushed"}

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        request_id = body.get("request_id")
        if not isinstance(request_id, str):
            raise InvalidArgument(f"request_id {request_id!r}: expected text")
        await self._llm.abort(request_id)
        return {"status": "ok", "request_id": request_id}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise InvalidArgument(f"model_path {path!r}: expected a directory")
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            if (version := body.get("weight_version")) is not None:
                await self._llm.update_weight_version(str(version))
        finally:
            await self._llm.resume_generation()
        return {"status": "ok", "message": "Weights updated", "model_path": path}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": await self._llm.get_weight_version()}

    async def set_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("weight_version")
        if version is None:
            raise InvalidArgument("weight_version is missing")
        await self._llm.update_weight_version(str(version))
        return {"status": "ok", "version": str(version)}

    def _guarded(self, name: str, work: Work) -> Work:
        """One at a time; what goes wrong is the answer."""

        async def run(body: dict[str, Any]) -> dict[str, Any]:
            async with self._one_at_a_time:
                try:
                    return await work(body if isinstance(body, dict) else {})
                except InvalidArgument as error:
                    return {"status": "error", "message": str(error)}
                except Exception as error:  # The request's boundary: the engine's own words.
                    logger.exception("engine route %s failed", name)
                    return {"status": "error", "message": f"{type(error).__name__}: {error}"}

        return run
