"""Controls: operations of SGLang at `POST /engine/<name>`.

A worker whose engine has released memory leaves discovery; it registers again when all memory is resumed. The fields
of a body are those of SGLang's own request; unknown fields are rejected.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.backend.controls import Panel, Work, out_of_service
from dynamo.backend.engine import EngineHost
from dynamo.core.boundaries import AsyncRollback
from dynamo.core.errors import InvalidArgument

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
UPDATES = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
}
"""Methods of SGLang's `TokenizerManager` that update weights, and their request classes."""
FOR_TRAINERS = ("init_weights_update_group", "destroy_weights_update_group")


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """A method of SGLang that is called by a path."""

    path: str
    method: str
    target: str | None
    """`engine`, `tm` (its `TokenizerManager`), or None: the first of them that has the method."""


def read_engine_route(text: str) -> EngineRoute:
    """Parse `<path>[=<method>][:engine|tm]`. Raise `InvalidArgument`."""
    rest, colon, target = text.rpartition(":")
    if not colon:
        rest, target = text, ""
    elif target not in ("engine", "tm"):
        raise InvalidArgument(f"{target!r} after the colon: must be engine or tm")
    path, equals, method = rest.partition("=")
    path = path.strip("/")
    method = method if equals else path.rpartition("/")[2]
    if not path or not method.isidentifier() or method.startswith("_"):
        raise InvalidArgument("expected <path>[=<method>][:engine|tm]")
    return EngineRoute(path, method, target or None)


class SglangControls:
    """The routes of one engine."""

    def __init__(
        self,
        engine: Any,
        messages: Any,
        host: EngineHost,
        *,
        has_training: bool = False,
        own: Sequence[EngineRoute] = (),
    ) -> None:
        """Set `engine`, SGLang's `Engine`, and `messages`, its `io_struct`; `own` are additional methods."""
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._messages = messages
        self._host = host
        self._panel = Panel()
        self._released: set[str] = set()
        self._offered: dict[str, Work] = {
            "control/start_profile": self.start_profile,
            "control/stop_profile": self.stop_profile,
            "control/release_memory_occupation": self.release_memory_occupation,
            "control/resume_memory_occupation": self.resume_memory_occupation,
            "control/update_weight_version": self.update_weight_version,
        }
        for name, word in UPDATES.items():
            if name not in FOR_TRAINERS:
                self._offered[f"control/{name}"] = self._update(name, word)
        if has_training:
            self._offered |= {name: self._update(name, word) for name, word in UPDATES.items()}
            self._offered |= {
                "liveness_probe": self.liveness_probe,
                "pause_generation": self.pause_generation,
                "resume_generation": self.resume_generation,
                "flush_cache": self.flush_cache,
                "abort_request": self.abort_request,
                "get_weight_version": self.get_weight_version,
                "set_weight_version": self.update_weight_version,
            }
        self._offered |= {route.path: self._method(route) for route in own}

    def routes(self) -> dict[str, Work]:
        """The routes by upstream's names."""
        return self._panel.guarded(self._offered)

    def endpoints(self) -> dict[str, Work]:
        """The endpoints of the request plane by name."""
        return self._panel.guarded({"clear_kv_blocks": self.clear_kv_blocks})

    async def clear_kv_blocks(self, body: dict[str, Any]) -> dict[str, Any]:
        result = await self._manager.flush_cache()
        if not result.success:
            return {"status": "error", "message": result.message or "KV cache reset failed"}
        return {"status": "success", "message": "KV cache cleared"}

    async def start_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._manager.start_profile(self._message("ProfileReq", body))
        return {"status": "ok", "message": "Profiling started"}

    async def stop_profile(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._manager.stop_profile()
        return {"status": "ok", "message": "Profiling stopped"}

    # Memory.

    async def release_memory_occupation(self, body: dict[str, Any]) -> dict[str, Any]:
        tags = tags_of(body)
        message = self._message("ReleaseMemoryOccupationReqInput", {"tags": tags})
        was_whole = not self._released
        if was_whole:
            await out_of_service(self._host)
        async with AsyncRollback(self._host.return_to_service) if was_whole else contextlib.nullcontext():
            await self._manager.release_memory_occupation(message, None)
        self._released |= set(tags or MEMORY_TAGS)
        return {"status": "ok", "message": "Memory released"}

    async def resume_memory_occupation(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._released:
            return {"status": "ok", "message": "Memory is not released"}
        tags = tags_of(body)
        message = self._message("ResumeMemoryOccupationReqInput", {"tags": tags})
        await self._manager.resume_memory_occupation(message, None)
        self._released -= set(tags or MEMORY_TAGS)
        if self._released:
            return {
                "status": "ok",
                "message": f"Memory partly resumed; still released: {', '.join(sorted(self._released))}",
            }
        await self._host.return_to_service()
        return {"status": "ok", "message": "Memory resumed"}

    # Weights.

    def _update(self, name: str, word: str) -> Work:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            result = await getattr(self._manager, name)(self._message(word, body), None)
            if not result[0]:
                return {"status": "error", "message": str(result[1])}
            return {"status": "ok", "message": str(result[1] or "Weights updated")}

        return run

    async def update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("new_version", body.get("weight_version"))
        if version is None:
            raise InvalidArgument("new_version is missing")
        fields = {name: value for name, value in body.items() if name not in ("new_version", "weight_version")}
        message = self._message("UpdateWeightVersionReqInput", {**fields, "new_version": str(version)})
        await self._manager.update_weight_version(message)
        return {"status": "ok", "version": str(version)}

    # For trainers.

    async def liveness_probe(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "alive": not self._manager.gracefully_exit}

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise InvalidArgument(f"mode {mode!r}: expected abort, retract or in_place")
        await self._manager.pause_generation(self._message("PauseGenerationReqInput", {"mode": mode}))
        return {"status": "ok", "message": "Engine paused"}

    async def resume_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._manager.continue_generation(self._message("ContinueGenerationReqInput", body))
        return {"status": "ok", "message": "Engine resumed"}

    async def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        result = await self._manager.flush_cache()
        if not result.success:
            raise InvalidArgument(result.message or "the cache was not flushed: active requests use it")
        return {"status": "ok", "message": "Cache flushed"}

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("abort_all") is True:
            self._manager.abort_request(abort_all=True)
            return {"status": "ok", "message": "All requests aborted"}
        request_id = body.get("request_id", body.get("rid"))
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgument(f"request_id {request_id!r}: expected a string")
        self._manager.abort_request(rid=request_id)
        return {"status": "ok", "request_id": request_id}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": self._manager.config_value("weight_version")}

    # SGLang's requests.

    def _message(self, name: str, body: dict[str, Any]) -> Any:
        """Return a request object of SGLang. Raise `InvalidArgument` for unknown fields."""
        try:
            return getattr(self._messages, name)(**body)
        except TypeError as error:
            raise InvalidArgument(str(error)) from None

    def _method(self, route: EngineRoute) -> Work:
        targets = {"engine": self._engine, "tm": self._manager}
        looked = [targets[route.target]] if route.target else [self._manager, self._engine]
        found = next((one for target in looked if callable(one := getattr(target, route.method, None))), None)
        if found is None:
            raise InvalidArgument(f"--engine-route {route.path}: SGLang has no method {route.method}")
        return called(found)


def called(method: Any) -> Work:
    """Return a handler that passes the body's fields as arguments; a synchronous method runs in a thread."""

    async def run(body: dict[str, Any]) -> dict[str, Any]:
        try:
            inspect.signature(method).bind(**body)
        except TypeError as error:
            raise InvalidArgument(str(error)) from None
        if inspect.iscoroutinefunction(method):
            result = await method(**body)
        else:
            result = await asyncio.to_thread(method, **body)
        return {"status": "ok", "result": plain(result)}

    return run


def plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return str(value)


def tags_of(body: dict[str, Any]) -> list[str] | None:
    """Return the selected parts of the memory; None: all. Raise `InvalidArgument`."""
    tags = body.get("tags")
    if tags is None:
        return None
    if not isinstance(tags, list) or not tags or any(tag not in MEMORY_TAGS for tag in tags):
        raise InvalidArgument(f"tags {tags!r}: expected a list of {', '.join(MEMORY_TAGS)}")
    return list(tags)
