"""ProxyEngine: a server elsewhere behind a worker.

    submit ──▶ convert ──▶ POST to the server ──server-sent events──▶ convert ──▶ the reply
               health page ──▶ the worker leaves, and returns        metrics page ──▶ load

A request is a task here, and a connection: cancelling the one closes the other, by which the server hears that nobody
listens.
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
from dynamo.core.http_client import HttpAnswer, HttpClient
from dynamo.core.tasks import TaskOwner
from dynamo.openai_proxy.config import ProxyConfig
from dynamo.openai_proxy.convert import DONE, refusal
from dynamo.openai_proxy.facts import Facts, Offer, get, make_client
from dynamo.openai_proxy.health import HealthWatch
from dynamo.openai_proxy.metrics import loads_of, samples_of
from dynamo.openai_proxy.tokens import Asked
from dynamo.protocols.load import WorkerLoad
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

STOP_S = 5.0
ERROR_BYTES_MAX = 1 << 20
REQUEST_ID = "x-request-id"


class ProxyEngine(abc.ABC):
    """What is the same for text and tokens: `dynamo.backend.engine.LLMEngine` but for its requests."""

    def __init__(self, config: ProxyConfig, facts: Facts, offer: Offer, clock: Clock | None = None) -> None:
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
        """What the model's card says. Raises `ConfigError`."""

    def listen(self, tasks: TaskOwner) -> None:  # noqa: B027 - not every server tells something
        """Follows what the server tells beside its answers."""

    def cancel(self, reply: Reply) -> None:
        self._requests.drop(reply, 0.0)

    async def drain(self) -> None:
        await self._requests.drain()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.cancel_and_wait(STOP_S)
            self._client.close()

    # A request.

    def begin(
        self, reply: Reply, asked: Asked, read: Callable[[HttpAnswer], Awaitable[None]], *, is_movable: bool = False
    ) -> None:
        """Starts a request; `read` writes its answer to the reply. Raises `EngineShutdown` and `WorkerOverloaded`.

        `is_movable`: what the server itself fails at, another one may do.
        """
        if self._tasks is None:
            raise EngineShutdown("the engine is not running")
        if len(self._requests) >= self._config.max_connections:
            raise WorkerOverloaded(f"{len(self._requests)} requests run on the server already")
        self._requests.begin(self._answer(reply, asked, read, is_movable), reply)

    async def _answer(
        self, reply: Reply, asked: Asked, read: Callable[[HttpAnswer], Awaitable[None]], is_movable: bool
    ) -> None:
        """One request, from its beginning to its end. Raises what it ends in."""
        headers = {REQUEST_ID: reply.request_id, **asked.headers}
        try:
            async with self._client.ask("POST", asked.path, json_encode(asked.body), headers) as answer:
                if answer.status >= 400:
                    raise refusal(answer.status, await answer.read(ERROR_BYTES_MAX))
                await read(answer)
        except WorkerUnavailable as error:
            logger.warning("request %s: %s", reply.request_id, error)
            self._watch.suspect()
            raise
        except HttpError as error:
            if is_movable and error.code >= 500:
                raise WorkerUnavailable(str(error)) from None
            raise
        reply.finish()

    # Beside the requests.

    async def _health(self) -> int:
        status, _ = await get(self._client, self._facts.health_path)
        return status

    async def _follow_load(self) -> None:
        """Tells the load now and then: what the server's metrics say, or else what it was given by us."""
        while True:
            await self._clock.sleep(self._config.load_interval_s)
            await self.tell_load()

    async def tell_load(self) -> None:
        """Once; only what is new."""
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


async def chunks_of(answer: HttpAnswer) -> AsyncIterator[Any]:
    """Every chunk of a stream, or the whole of an answer that is none. Raises `Unknown` for what is no JSON."""
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
        raise Unknown(f"the server says {data[:80]!r}: {error}") from None
