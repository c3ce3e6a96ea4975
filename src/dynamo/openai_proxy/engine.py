"""ProxyEngine: the worker's engine interface in front of a remote server.

    submit ──▶ convert ──▶ POST to the server ──server-sent events──▶ convert ──▶ the reply
               health page ──▶ the worker leaves, and returns        metrics page ──▶ load

Each request is a task with its own connection: cancelling the task closes the connection, which cancels the request at
the server.
"""

import abc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.requests import Requests
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import UNREADABLE, json_decode, json_encode
from dynamo.core.errors import EngineShutdown, HttpError, Unknown, WorkerOverloaded, WorkerUnavailable
from dynamo.core.http_client import HttpClient, HttpResponse
from dynamo.core.tasks import TaskOwner
from dynamo.openai_proxy.config import ProxyConfig
from dynamo.openai_proxy.convert import DONE, refusal
from dynamo.openai_proxy.facts import ModelOffer, ServerFacts, get, make_client
from dynamo.openai_proxy.health import HealthWatch
from dynamo.openai_proxy.metrics import loads_of, samples_of
from dynamo.openai_proxy.tokens import ServerRequest
from dynamo.protocols.load import WorkerLoad
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

STOP_S = 5.0
ERROR_BYTES_MAX = 1 << 20
REQUEST_ID = "x-request-id"


class ProxyEngine(abc.ABC):
    """Common part of the text and token engines: `dynamo.backend.engine.LLMEngine` without `submit`."""

    def __init__(self, config: ProxyConfig, facts: ServerFacts, offer: ModelOffer, clock: Clock | None = None) -> None:
        self._config = config
        self._facts = facts
        self._offer = offer
        self._clock = clock or SystemClock()
        self._tasks: TaskOwner | None = None
        self._loads: list[WorkerLoad] = []
        self._requests: Requests
        self._client: HttpClient
        self._watch: HealthWatch
        self._host: EngineHost

    async def start(self, host: EngineHost) -> EngineConfig:
        self._host = host
        described = await self.describe()
        self._client = make_client(self._config)
        self._tasks = TaskOwner("openai_proxy")
        self._requests = Requests(self._tasks)
        self._watch = HealthWatch(
            self._health, host, self._clock, self._config.health_interval_s, f"the server at {self._client.authority}"
        )
        self._tasks.supervise(self._watch.run, "health", clock=self._clock)
        self._tasks.supervise(self._follow_load, "load", clock=self._clock)
        self.listen(self._tasks)
        return described

    @abc.abstractmethod
    async def describe(self) -> EngineConfig:
        """Return the contents of the model's card. Raises `ConfigError`."""

    def listen(self, tasks: TaskOwner) -> None:  # noqa: B027 - not every server publishes events
        """Start receiving the events that the server publishes, if any."""

    def cancel(self, reply: Reply) -> None:
        self._requests.drop(reply, 0.0)

    async def drain(self) -> None:
        await self._requests.drain()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.cancel_and_wait(STOP_S)
            self._client.close()

    # Requests.

    def begin(
        self,
        reply: Reply,
        server_request: ServerRequest,
        read: Callable[[HttpResponse], Awaitable[None]],
        *,
        is_movable: bool = False,
    ) -> None:
        """Start a request; `read` writes its response to the reply. Raises `EngineShutdown` and `WorkerOverloaded`.

        `is_movable`: another worker may retry the request after a failure of the server.
        """
        if self._tasks is None:
            raise EngineShutdown("the engine is not running")
        if len(self._requests) >= self._config.max_connections:
            raise WorkerOverloaded(f"the server already runs {len(self._requests)} requests (--max-connections)")
        self._requests.begin(self._answer(reply, server_request, read, is_movable), reply)

    async def _answer(
        self,
        reply: Reply,
        server_request: ServerRequest,
        read: Callable[[HttpResponse], Awaitable[None]],
        is_movable: bool,
    ) -> None:
        """Run one request until its end. Raises the error that ends it."""
        headers = {REQUEST_ID: reply.request_id, **server_request.headers}
        try:
            async with self._client.request(
                "POST", server_request.path, json_encode(server_request.body), headers
            ) as answer:
                if answer.status >= 400:
                    raise refusal(answer.status, await answer.read(ERROR_BYTES_MAX))
                await read(answer)
        except WorkerUnavailable as error:
            logger.warning("request %s: %s", reply.request_id, error)
            self._watch.check_now()
            raise
        except HttpError as error:
            if is_movable and error.code >= 500:
                raise WorkerUnavailable(str(error)) from None
            raise
        reply.finish()

    # Background tasks.

    async def _health(self) -> int:
        status, _ = await get(self._client, self._facts.health_path)
        return status

    async def _follow_load(self) -> None:
        """Publish the load periodically: from the server's metrics, or else the number of requests sent to it."""
        while True:
            await self._clock.sleep(self._config.load_interval_s)
            await self.publish_loads()

    async def publish_loads(self) -> None:
        """Publish the loads that have changed."""
        loads = await self._server_loads() or [
            WorkerLoad(running_requests=len(self._requests), kv_total_blocks=self._facts.total_blocks or 0)
        ]
        for load in loads:
            if load not in self._loads:
                self._host.publish_load(load)
        self._loads = loads

    async def _server_loads(self) -> list[WorkerLoad]:
        if not self._facts.has_metrics:
            return []
        try:
            status, body = await get(self._client, self._config.metrics_path)
        except WorkerUnavailable:
            return []
        if status != 200:
            return []
        return loads_of(samples_of(body.decode("utf-8", "replace")), self._facts.total_blocks or 0)


async def chunks_of(answer: HttpResponse) -> AsyncIterator[Any]:
    """Yield every chunk of a stream, or a response that is not a stream. Raises `Unknown` for invalid JSON."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        yield _decoded(await answer.read())
        return
    while (events := await answer.events()) is not None:
        for data in events:
            if data and data != DONE:
                yield _decoded(data)


def _decoded(data: bytes) -> Any:
    try:
        return json_decode(data)
    except UNREADABLE as error:
        raise Unknown(f"invalid JSON from the server: {data[:80]!r}: {error}") from None
