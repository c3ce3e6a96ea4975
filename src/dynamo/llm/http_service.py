"""HttpService: upstream's OpenAI server for engines in the same process.

An engine is an async generator function that takes the client's request and yields OpenAI's chunks. It is served like
any model with text input, by a private runtime within the process.
"""

import asyncio

from msgspec.structs import replace

from dynamo.core.errors import InvalidArgument
from dynamo.http.embedded import FrontendOptions, ServedFrontend, run_frontend
from dynamo.http.routes.groups import GROUPS
from dynamo.http.routes.table import RouteContext, RouteTable
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine, set_when_closed
from dynamo.model_card.types import ModelType
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.errors import ErrorAnswer

DEFAULT_PORT = 8080

CHAT = ModelType.Chat
COMPLETIONS = ModelType.Completions
KINDS = {"chat": CHAT, "completion": COMPLETIONS, "completions": COMPLETIONS}


def flat_errors(routes: RouteTable, context: RouteContext) -> None:
    """Let errors have upstream's keys alone: the programs that embed this service read and compare those bodies."""
    routes.entries = [
        replace(one, error_body=ErrorAnswer.flat_body) if one.error_body is ErrorAnswer.body else one
        for one in routes.entries
    ]


class HttpAsyncEngine(PythonAsyncEngine):
    """An engine of `HttpService`. An `HttpError` that it raises is sent to the client, as for every engine here."""


class HttpService:
    """OpenAI server. `wait_for_first_item` is always in effect: the status is sent with the first chunk or error."""

    def __init__(self, port: int | None = None, *, wait_for_first_item: bool = False, host: str = "0.0.0.0") -> None:  # noqa: S104
        self._wanted_port = DEFAULT_PORT if port is None else port
        self._options = FrontendOptions(host=host, port=self._wanted_port, groups=(*GROUPS, flat_errors))
        self._engines = LocalEngines(CHAT, COMPLETIONS)
        self._ending = asyncio.Event()
        self.port: int | None = None
        """Port of the server, once it listens."""

    def add_chat_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """Serve /v1/chat/completions for a model with the engine. `checksum` has no effect (compatibility)."""
        self._engines.add(CHAT, model, engine)

    def add_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """Serve /v1/completions for a model with the engine."""
        self._engines.add(COMPLETIONS, model, engine)

    def remove_chat_completions_model(self, model: str) -> None:
        """Stop serving a model. Raise `InvalidArgument` for a name that is not served."""
        self._engines.remove(CHAT, model)

    def remove_completions_model(self, model: str) -> None:
        """Stop serving a model. Raise `InvalidArgument` for a name that is not served."""
        self._engines.remove(COMPLETIONS, model)

    def list_chat_completions_models(self) -> list[str]:
        return self._engines.names(CHAT)

    def list_completions_models(self) -> list[str]:
        return self._engines.names(COMPLETIONS)

    def enable_endpoint(self, endpoint_type: str, enabled: bool) -> None:
        """Show or hide `chat` or `completions`, which are shown by default. Raise `InvalidArgument`."""
        if endpoint_type == "batch":
            raise InvalidArgument("batch endpoint availability is fixed when the HTTP service is built")
        kind = KINDS.get(endpoint_type.lower())
        if kind is None:
            raise InvalidArgument(f"endpoint type {endpoint_type!r}: expected one of {', '.join(KINDS)}")
        self._engines.show(kind, enabled)

    async def run(self, runtime: DistributedRuntime) -> None:
        """Serve until `shutdown`, or until the runtime has shut down."""
        closed = asyncio.Event()
        async with self._engines.serving() as inner:
            frontend = ServedFrontend(inner, self._options, runtime.metrics)
            watching = asyncio.ensure_future(set_when_closed(runtime, closed))
            try:
                await self._serve(frontend, closed)
            finally:
                watching.cancel()

    def shutdown(self) -> None:
        """Stop `run`."""
        self._ending.set()

    async def _serve(self, frontend: ServedFrontend, closed: asyncio.Event) -> None:
        from dynamo.core.listening import bind

        listener = bind(self._options.host, self._wanted_port, "--http-port")
        self.port = int(listener.getsockname()[1])
        await run_frontend(frontend, self._ending, closed, listener=listener)
