"""SelectRoutes: the HTTP API of the selection service."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dynamo.core.errors import HttpError, SelectionServiceError
from dynamo.routing.services.selection import Id, PromptBody, ReservationBody, SelectionService, WorkerBody
from dynamo.routing.sync.replica_peers import add_peer_routes
from dynamo.runtime.json_service import Handler, HttpCall, JsonRoutes

OK = {"status": "ok"}


class NewWorkerBody(WorkerBody, kw_only=True):
    """A worker with its id."""

    worker_id: Id


class OutputBlockBody(msgspec.Struct):
    """One more block of an output."""

    decay_fraction: float | None = None


class SelectRoutes:
    """Handlers of one selection service."""

    def __init__(self, service: SelectionService) -> None:
        self._service = service
        self.routes = JsonRoutes()
        for method, path, handler, body in (
            ("GET", "/health", self.health, None),
            ("GET", "/ready", self.ready, None),
            ("GET", "/workers", self.workers, None),
            ("POST", "/workers", self.upsert, NewWorkerBody),
            ("PATCH", "/workers/{}", self.update, dict),
            ("DELETE", "/workers/{}", self.delete, None),
            ("GET", "/loads", self.loads, None),
            ("GET", "/dump", self.dump, None),
            ("POST", "/select", self.answered(service.select), PromptBody),
            ("POST", "/select_and_reserve", self.answered(service.select_and_reserve), PromptBody),
            ("POST", "/overlap_scores", self.answered(service.overlap_scores), PromptBody),
            ("POST", "/potential_loads", self.answered(service.potential_loads), PromptBody),
            ("POST", "/reservations", self.answered(service.create_reservation, 201), ReservationBody),
            ("POST", "/reservations/{}/prefill_complete", self.prefill_complete, None),
            ("POST", "/reservations/{}/output_block", self.output_block, OutputBlockBody),
            ("DELETE", "/reservations/{}", self.free, None),
        ):
            self.routes.add(method, path, refused(handler), body)
        add_peer_routes(self.routes, service.peers)

    def answered(self, method: Callable[[Any], Awaitable[Any]], status: int = 200) -> Handler:
        """Return the handler of a route that calls one method of the service."""

        async def answer(call: HttpCall[Any]) -> tuple[int, Any]:
            return status, await method(call.body)

        return answer

    async def health(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, OK

    async def ready(self, call: HttpCall[None]) -> tuple[int, Any]:
        state = self._service.ready()
        return (200 if state["ready"] else 503), state

    async def workers(self, call: HttpCall[None]) -> tuple[int, Any]:
        query = call.query
        return 200, self._service.list_workers(
            model_name=query.get("model_name"), routing_group=query.get("routing_group")
        )

    async def upsert(self, call: HttpCall[NewWorkerBody]) -> tuple[int, Any]:
        return 201, await self._service.upsert_worker(call.body)

    async def update(self, call: HttpCall[dict[str, Any]]) -> tuple[int, Any]:
        return 200, await self._service.update_worker(worker_of(call.path), call.body)

    async def delete(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, await self._service.delete_worker(worker_of(call.path))

    async def loads(self, call: HttpCall[None]) -> tuple[int, Any]:
        query = call.query
        return 200, self._service.loads(model_name=query.get("model_name"), routing_group=query.get("routing_group"))

    async def dump(self, call: HttpCall[None]) -> tuple[int, Any]:
        return 200, self._service.dump()

    async def prefill_complete(self, call: HttpCall[None]) -> tuple[int, Any]:
        await self._service.prefill_complete(call.path)
        return 200, OK

    async def output_block(self, call: HttpCall[OutputBlockBody]) -> tuple[int, Any]:
        self._service.add_output_block(call.path, decay_fraction=call.body.decay_fraction)
        return 200, OK

    async def free(self, call: HttpCall[None]) -> tuple[int, Any]:
        await self._service.free_reservation(call.path)
        return 200, OK


def worker_of(text: str) -> int:
    """Return the worker id in a path. Raises `HttpError`."""
    if not text.isdecimal():
        raise HttpError(400, f"worker id {text!r}: expected a number")
    return int(text)


def refused(handler: Handler) -> Handler:
    """Convert the service's errors to HTTP errors."""

    async def answer(call: HttpCall[Any]) -> tuple[int, Any]:
        try:
            return await handler(call)
        except SelectionServiceError as error:
            raise HttpError(error.status_code, str(error)) from None

    return answer
