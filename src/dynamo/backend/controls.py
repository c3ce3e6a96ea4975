"""Controls: engine operations at `POST /engine/<name>` of the system port.

An engine provides objects for the operations that it supports; others have no route. A worker with a sleeping engine
leaves discovery; it registers again when all parts are awake. A response is `{"status": "ok"}`, or
`{"status": "error", "message": …}` for an operation that the engine rejects.

Some engines serve operations as auxiliary endpoints of the worker's component, too (`serve_auxiliary`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from dynamo.backend.engine import EngineHost
from dynamo.core.boundaries import AsyncRollback
from dynamo.core.codec import decode
from dynamo.core.errors import DynamoException, InvalidArgument, Unknown
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.component import Endpoint, Serving
from dynamo.runtime.request_plane.base import Reply, Request
from dynamo.runtime.server import EngineRoute, ServeOptions

logger = logging.getLogger(__name__)

SLEEP_LEVELS = (1, 2, 3)
DRAIN_S = 300.0  # Time for running requests before the engine sleeps: the longest time promised to a client.

Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Panel:
    """The controls of one engine: executed one at a time; errors are returned as responses."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    def guarded(self, routes: Mapping[str, Work]) -> dict[str, Work]:
        return {name: self._guarded(name, work) for name, work in routes.items()}

    def _guarded(self, name: str, work: Work) -> Work:
        async def run(body: dict[str, Any]) -> dict[str, Any]:
            async with self._one_at_a_time:
                try:
                    return await work(body if isinstance(body, dict) else {})
                except InvalidArgument as error:
                    return {"status": "error", "message": str(error)}
                except Exception as error:  # Request boundary: the operator gets an answer, whatever failed.
                    logger.exception("engine route %s failed", name)
                    return {"status": "error", "message": f"{type(error).__name__}: {error}"}

        return run


class Sleeper(Protocol):
    """An engine that can release its memory."""

    async def sleep(self, level: int) -> None:
        """Release memory. Called without running requests; none is sent until the engine is awake."""

    async def wake_up(self, tags: list[str] | None) -> bool | None:
        """Wake the parts given by `tags`, or all; return False while other parts sleep."""


class SleepControls:
    """`control/sleep`, `control/wake_up`."""

    def __init__(self, engine: Sleeper, host: EngineHost) -> None:
        self._engine = engine
        self._host = host
        self._is_asleep = False

    def routes(self) -> dict[str, Work]:
        return {"control/sleep": self.sleep, "control/wake_up": self.wake_up}

    async def sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        level = body.get("level", 1)
        if level not in SLEEP_LEVELS:
            raise InvalidArgument(f"level {level!r}: expected one of 1, 2, 3")
        if self._is_asleep:
            return {"status": "ok", "message": "Engine already asleep"}
        await out_of_service(self._host)
        async with AsyncRollback(self._host.return_to_service):
            await self._engine.sleep(level)
        self._is_asleep = True
        return {"status": "ok", "message": f"Engine slept (level={level})"}

    async def wake_up(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._is_asleep:
            return {"status": "ok", "message": "Engine already awake"}
        if await self._engine.wake_up(body.get("tags")) is False:
            return {"status": "ok", "message": "Engine partly awake"}
        self._is_asleep = False
        await self._host.return_to_service()
        return {"status": "ok", "message": "Engine woke"}


class Profiled(Protocol):
    """An engine with a profiler."""

    async def start_profile(self, prefix: str | None) -> None:
        """Start profiling; `prefix` is for the names of the files."""

    async def stop_profile(self) -> str | None:
        """Stop profiling and return the location of the files, if the engine reports it."""


class ProfileControls:
    """`control/start_profile`, `control/stop_profile`."""

    def __init__(self, engine: Profiled) -> None:
        self._engine = engine

    def routes(self) -> dict[str, Work]:
        return {"control/start_profile": self.start, "control/stop_profile": self.stop}

    async def start(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._engine.start_profile(body.get("profile_prefix"))
        return {"status": "ok", "message": "Profiling started"}

    async def stop(self, body: dict[str, Any]) -> dict[str, Any]:
        path = await self._engine.stop_profile()
        return {"status": "ok", "message": "Profiling stopped"} | ({"path": path} if isinstance(path, str) else {})


class Caching(Protocol):
    """An engine with a prefix cache."""

    async def reset_prefix_cache(self) -> bool:
        """Clear the cache; return False if that is not possible at the moment."""


class CacheControls:
    """The `clear_kv_blocks` endpoint, and the route with the trainers' name for it."""

    def __init__(self, engine: Caching) -> None:
        self._engine = engine

    def endpoints(self) -> dict[str, Work]:
        return {"clear_kv_blocks": self.clear}

    async def clear(self, body: dict[str, Any]) -> dict[str, Any]:
        if not await self._engine.reset_prefix_cache():
            return {"status": "error", "message": "KV cache reset failed"}
        return {"status": "success", "message": "KV cache cleared"}

    async def flush(self, body: dict[str, Any]) -> dict[str, Any]:
        if not await self._engine.reset_prefix_cache():
            raise InvalidArgument("the cache was not flushed: active requests use it")
        return {"status": "ok", "message": "Cache flushed"}


class Trained(Caching, Protocol):
    """An engine whose weights can be replaced at runtime."""

    async def check_health(self) -> None:
        """Raise an error if the engine is not healthy."""

    async def abort(self, request_id: str) -> None:
        """Abort a request; no effect on a completed one."""

    async def update_weights(self, path: str, version: str | None) -> None:
        """Update all weights while no request mixes old and new ones. Raise `InvalidArgument`."""

    async def get_weight_version(self) -> str:
        """Return the version label of the weights."""

    async def update_weight_version(self, version: str) -> None:
        """Set the version label of the weights."""


class TrainerControls:
    """Operations for trainers of an engine with `--enable-rl`."""

    def __init__(self, engine: Trained) -> None:
        self._engine = engine
        self._cache = CacheControls(engine)

    def routes(self) -> dict[str, Work]:
        return {
            "liveness_probe": self.liveness_probe,
            "flush_cache": self._cache.flush,
            "abort_request": self.abort_request,
            "update_weights_from_disk": self.update_weights_from_disk,
            "get_weight_version": self.get_weight_version,
            "set_weight_version": self.set_weight_version,
        }

    async def liveness_probe(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._engine.check_health()
        return {"status": "ok", "alive": True}

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        request_id = body.get("request_id")
        if not isinstance(request_id, str):
            raise InvalidArgument(f"request_id {request_id!r}: expected a string")
        await self._engine.abort(request_id)
        return {"status": "ok", "request_id": request_id}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise InvalidArgument(f"model_path {path!r}: expected a directory")
        version = body.get("weight_version")
        await self._engine.update_weights(path, None if version is None else str(version))
        return {"status": "ok", "message": "Weights updated", "model_path": path}

    async def get_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "version": await self._engine.get_weight_version()}

    async def set_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("weight_version")
        if version is None:
            raise InvalidArgument("weight_version is missing")
        await self._engine.update_weight_version(str(version))
        return {"status": "ok", "version": str(version)}


async def out_of_service(host: EngineHost) -> None:
    """Leave service and return when no request runs; on timeout return to service and raise `TimeoutError`."""
    async with AsyncRollback(host.return_to_service), asyncio.timeout(DRAIN_S):
        await host.leave_service()


async def serve_auxiliary(
    endpoint: Endpoint, routes: Mapping[str, EngineRoute], *, is_internal: bool = False
) -> list[Serving]:
    """Serve each route as an endpoint of that name in the component of `endpoint`.

    `is_internal`: the endpoints are no part of the process's health and metrics.
    """
    runtime, own = endpoint.runtime, endpoint.id
    return [
        await runtime.endpoint(str(EndpointId(own.namespace, own.component, name))).serve(
            _Handler(endpoint, name, route).handle, ServeOptions(is_internal=is_internal)
        )
        for name, route in routes.items()
    ]


class _Handler:
    """Request handler of one route."""

    def __init__(self, endpoint: Endpoint, name: str, route: EngineRoute) -> None:
        self._tasks = endpoint.runtime.tasks
        self._name = name
        self._route = route

    def handle(self, request: Request, reply: Reply) -> None:
        """Start a request. Raise `InvalidArgument` for one that cannot be decoded."""
        body = decode(request.body, request.codec, Any) if request.body else {}
        self._tasks.start(self._answer(body if isinstance(body, dict) else {}, reply), self._name)

    async def _answer(self, body: dict[str, Any], reply: Reply) -> None:
        try:
            reply.item(await self._route(body))
            reply.finish()
        except DynamoException as error:
            reply.fail(error)
        except Exception as error:  # Request boundary: the caller gets the error, the task owner logs it.
            reply.fail(Unknown(f"{self._name}: {error}"))
            raise
