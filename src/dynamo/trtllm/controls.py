"""Controls: operations of TensorRT-LLM at `POST /engine/<name>`.

Its workers support them only if Ray runs them (`orchestrator_type: ray`): otherwise the routes do not exist.
"""

import asyncio
import contextlib
from typing import Any

from dynamo.backend.controls import Panel, Work, out_of_service
from dynamo.backend.engine import EngineHost
from dynamo.core.boundaries import AsyncRollback
from dynamo.core.errors import InvalidArgument

MEMORY_TAGS = ("model", "kv_cache")
EXTENSION = "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"
"""Extension of the workers for weight updates, cache resets and profiles."""


class TrtllmControls:
    """The routes of one engine."""

    def __init__(self, llm: Any, host: EngineHost, args: dict[str, Any]) -> None:
        """Set `args`, the arguments of the `LLM`."""
        self._llm = llm
        self._host = host
        self._panel = Panel()
        self._released: set[str] = set()
        self._has_ray = args.get("orchestrator_type") == "ray"
        self._has_extension = self._has_ray and args.get("ray_worker_extension_cls") == EXTENSION

    def routes(self) -> dict[str, Work]:
        """The routes by upstream's names."""
        found: dict[str, Work] = {}
        if self._has_ray:
            found |= {
                "control/release_memory_occupation": self.release_memory_occupation,
                "control/resume_memory_occupation": self.resume_memory_occupation,
            }
        if self._has_extension:
            found |= {
                "control/start_profile": self.start_profile,
                "control/stop_profile": self.stop_profile,
                "control/update_weights_from_ipc": self.update_weights_from_ipc,
                "flush_cache": self.flush_cache,
            }
        return self._panel.guarded(found)

    def endpoints(self) -> dict[str, Work]:
        """The endpoints of the request plane by name."""
        return self._panel.guarded({"clear_kv_blocks": self.clear_kv_blocks}) if self._has_extension else {}

    async def clear_kv_blocks(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._call_workers("reset_prefix_cache")
        return {"status": "success", "message": "KV cache cleared"}

    async def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._call_workers("reset_prefix_cache")
        return {"status": "ok", "message": "Cache flushed"}

    async def start_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._call_workers("start_profile")
        return {"status": "ok", "message": "Profiling started"}

    async def stop_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._call_workers("stop_profile")
        return {"status": "ok", "message": "Profiling stopped"}

    async def update_weights_from_ipc(self, body: dict[str, Any]) -> dict[str, Any]:
        """Update weights from `ipc_handles` by device; None after the last ones."""
        handles = body.get("ipc_handles")
        if handles is not None and not isinstance(handles, dict):
            raise InvalidArgument("ipc_handles: expected an object of handles by device, or null")
        await self._call_workers("update_weights", handles)
        return {"status": "ok", "message": "Weights updated"}

    async def release_memory_occupation(self, body: dict[str, Any]) -> dict[str, Any]:
        tags = tags_of(body)
        was_whole = not self._released
        if was_whole:
            await out_of_service(self._host)
        async with AsyncRollback(self._host.return_to_service) if was_whole else contextlib.nullcontext():
            await self._call_workers("sleep", tags)
        self._released |= set(tags)
        return {"status": "ok", "message": "Memory released"}

    async def resume_memory_occupation(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._released:
            return {"status": "ok", "message": "Memory is not released"}
        tags = tags_of(body)
        await self._call_workers("wakeup", tags)
        self._released -= set(tags)
        if self._released:
            return {
                "status": "ok",
                "message": f"Memory partly resumed; still released: {', '.join(sorted(self._released))}",
            }
        await self._host.return_to_service()
        return {"status": "ok", "message": "Memory resumed"}

    async def _call_workers(self, method: str, *args: Any) -> None:
        """Call a method on every worker and wait for all of them."""
        await asyncio.to_thread(self._llm._collective_rpc, method, args)


def tags_of(body: dict[str, Any]) -> list[str]:
    """Return the selected parts of the memory, by default all. Raise `InvalidArgument`."""
    tags = body.get("tags")
    if tags is None:
        return list(MEMORY_TAGS)
    if not isinstance(tags, list) or not tags or any(tag not in MEMORY_TAGS for tag in tags):
        raise InvalidArgument(f"tags {tags!r}: expected a list of {', '.join(MEMORY_TAGS)}")
    return list(tags)
