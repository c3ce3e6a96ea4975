"""Controls: operations of vLLM at `POST /engine/<name>`."""

from typing import Any

from dynamo.backend.controls import CacheControls, Panel, ProfileControls, SleepControls, TrainerControls, Work
from dynamo.backend.engine import EngineHost
from dynamo.core.errors import InvalidArgument

PAUSES = ("abort", "wait", "keep")


class VllmControls:
    """The routes of one engine."""

    def __init__(self, llm: Any, host: EngineHost, *, has_training: bool = False) -> None:
        """Set `llm`, vLLM's `AsyncLLM`; `has_training` adds the operations for trainers."""
        self._llm = llm
        self._panel = Panel()
        self._offered: dict[str, Work] = {
            **ProfileControls(llm).routes(),
            **SleepControls(llm, host).routes(),
            "control/scale_elastic_ep": self.scale_elastic_ep,
        }
        if has_training:
            self._offered |= {
                **TrainerControls(_Trained(llm)).routes(),
                "pause_generation": self.pause_generation,
                "resume_generation": self.resume_generation,
            }

    def routes(self) -> dict[str, Work]:
        """The routes by upstream's names."""
        return self._panel.guarded(self._offered)

    def endpoints(self) -> dict[str, Work]:
        """The endpoints of the request plane by name."""
        return self._panel.guarded({**CacheControls(self._llm).endpoints(), "get_perf_metrics": self.get_perf_metrics})

    async def get_perf_metrics(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what released workers without `--benchmark-mode` return: this adapter has no benchmark."""
        return {"status": "error", "message": "no benchmark data"}

    async def scale_elastic_ep(self, body: dict[str, Any]) -> dict[str, Any]:
        size = body.get("new_data_parallel_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidArgument(f"new_data_parallel_size {size!r}: expected a whole number above 0")
        await self._llm.scale_elastic_ep(size)
        return {"status": "ok", "message": f"Scaled to {size} data parallel ranks"}

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in PAUSES:
            raise InvalidArgument(f"mode {mode!r}: expected abort, wait or keep")
        await self._llm.pause_generation(mode=mode, clear_cache=body.get("clear_cache", True))
        return {"status": "ok", "message": "Engine paused"}

    async def resume_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._llm.resume_generation()
        return {"status": "ok", "message": "Engine resumed"}


class _Trained:
    """`Trained` over vLLM."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.check_health = llm.check_health
        self.abort = llm.abort
        self.reset_prefix_cache = llm.reset_prefix_cache

    async def get_weight_version(self) -> str:
        return str(await self._llm.get_weight_version())

    async def update_weight_version(self, version: str) -> None:
        await self._llm.update_weight_version(version)

    async def update_weights(self, path: str, version: str | None) -> None:
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            if version is not None:
                await self._llm.update_weight_version(version)
        finally:
            await self._llm.resume_generation()
