"""KServe service: the gRPC server and its methods."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import dynamo
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.extras import install_command
from dynamo.core.listening import bind
from dynamo.grpc.calls import CallContext, Headers, KserveCalls
from dynamo.grpc.descriptions import PLATFORM, config_of, is_tensor, metadata_of
from dynamo.grpc.messages import CLASSES, SERVICE
from dynamo.grpc.received import received
from dynamo.grpc.statuses import RequestRefused, status_of
from dynamo.grpc.tensor_responses import Serialized
from dynamo.http.embedded import ServedFrontend
from dynamo.http.server.gate import Account, Gate
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

try:
    import grpc
except ImportError:
    raise ConfigError(f"--kserve-grpc-server: requires gRPC; install it: {install_command('grpc')}") from None

logger = logging.getLogger(__name__)

STREAM = "ModelStreamInfer"
OPEN_PATHS = frozenset(f"/{SERVICE}/{method}".encode() for method in ("ServerLive", "ServerReady"))
"""Methods of probes, which need no key."""
EXTENSIONS = ("model_configuration",)
REQUESTS_MAX = 8192  # Concurrent requests; further ones are refused.
MESSAGE_VARIABLE = "DYN_GRPC_MESSAGE_LIMIT_MB"
MESSAGE_MB = 4
"""Limit of messages, that of the released frontend. gRPC copies a message on the event loop, a MiB in up to 3 ms."""


def message_limit() -> int:
    """Return the most MiB of a message; 0 is unlimited. Raise `ConfigError`."""
    limit = setting(MESSAGE_VARIABLE, MESSAGE_MB, int)
    if limit < 0:
        raise ConfigError(f"{MESSAGE_VARIABLE}={limit}: must be at least 0 (0: unlimited)")
    return limit


@dataclass(frozen=True, slots=True)
class KserveOptions:
    """Options of one service."""

    host: str = "0.0.0.0"  # noqa: S104 - upstream's default
    port: int = 8787
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    message_bytes_max: int = field(default_factory=lambda: message_limit() << 20)
    window_bytes: int = field(default_factory=lambda: setting("DYN_GRPC_INITIAL_STREAM_WINDOW_SIZE", 65536, int))


class KserveService:
    """KServe server of one frontend."""

    def __init__(
        self,
        pipeline: Pipeline,
        models: Models,
        is_sound: Callable[[], bool] = lambda: True,
        options: KserveOptions | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`gate` checks the API keys of requests, if keys are set."""
        self._options = options or KserveOptions()
        self._pipeline = pipeline
        self._calls = KserveCalls(pipeline, models)
        self._is_sound = is_sound
        self._gate = gate
        self._server: Any = None
        self.port = 0
        """Port of the listener, once it is bound."""

    def bind(self) -> int:
        """Bind the port and return it; must be called on the loop. Raise `StartupError` if the port is in use."""
        options = self._options
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", options.message_bytes_max or -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.lookahead_bytes", options.window_bytes),
                # By default gRPC cancels, without a reason, some of the requests of a burst from the 1,000th on.
                ("grpc.server.max_pending_requests", REQUESTS_MAX),
                ("grpc.server.max_pending_requests_hard_limit", REQUESTS_MAX),
            ],
            maximum_concurrent_rpcs=REQUESTS_MAX,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        host = f"[{options.host}]" if ":" in options.host else options.host
        bind(options.host, options.port, "--http-port").close()  # Reports a port in use in our form.
        credentials = _credentials(options)
        try:
            if credentials is None:
                port = server.add_insecure_port(f"{host}:{options.port}")
            else:
                port = server.add_secure_port(f"{host}:{options.port}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"--http-port {options.port} (host {options.host}): cannot be bound for gRPC: {error}"
            ) from None
        self._server = server
        self.port = int(port)
        return self.port

    async def start(self) -> None:
        """Start to serve requests. Raise the errors of `bind` if it was not called before."""
        if self._server is None:
            self.bind()
        await self._server.start()
        logger.info("KServe ready: %s:%d", self._options.host, self.port)

    async def stop(self, budget_s: float) -> None:
        """Refuse new requests, let those in progress end within the budget, and close."""
        if self._server is not None:
            await self._server.stop(budget_s)
        self._calls.close()

    # Methods.

    async def server_live(self, message: Any, account: Account | None) -> Any:
        return CLASSES["ServerLiveResponse"](live=True)

    async def server_ready(self, message: Any, account: Account | None) -> Any:
        return CLASSES["ServerReadyResponse"](ready=self._is_sound() and not self._pipeline.is_draining)

    async def server_metadata(self, message: Any, account: Account | None) -> Any:
        return CLASSES["ServerMetadataResponse"](name=PLATFORM, version=dynamo.__version__, extensions=EXTENSIONS)

    async def model_ready(self, message: Any, account: Account | None) -> Any:
        try:
            is_tensor(self._calls.find(message.name, account).card)
        except DynamoException:
            return CLASSES["ModelReadyResponse"](ready=False)
        return CLASSES["ModelReadyResponse"](ready=True)

    async def model_metadata(self, message: Any, account: Account | None) -> Any:
        return metadata_of(self._calls.find(message.name, account).card)

    async def model_config(self, message: Any, account: Account | None) -> Any:
        return config_of(self._calls.find(message.name, account).card)

    async def model_infer(self, message: Any, headers: Headers) -> Any:
        """Return the single response of a request."""
        call_context = self._admit("ModelInfer", headers, streams=False)
        try:
            async with aclosing(self._calls.answers(message, call_context)) as answers:
                whole = [answer async for answer in answers]
        finally:
            if call_context.account is not None:
                call_context.account.close()
        assert len(whole) == 1, "a unary call has one response"
        return whole[0]

    async def model_stream_infer(self, messages: AsyncIterator[Any], headers: Headers) -> AsyncGenerator[Any, None]:
        """Process the requests in order and yield all responses of each.

        An invalid request ends the stream with its status; a failure of a worker is sent as a message of the stream.
        """
        kind = CLASSES["ModelStreamInferResponse"]
        async for message in messages:
            call_context = self._admit(STREAM, headers, streams=True)
            has_begun = False
            try:
                async with aclosing(self._calls.answers(message, call_context)) as answers:
                    async for answer in answers:
                        has_begun = True
                        yield answer if isinstance(answer, Serialized) else kind(infer_response=answer)
            except DynamoException as error:
                status, text = status_of(error)
                if not has_begun and status != "INTERNAL":
                    raise
                yield kind(error_message=text, infer_response=CLASSES["ModelInferResponse"](id=message.id))
            finally:
                if call_context.account is not None:
                    call_context.account.close()

    def _admit(self, method: str, headers: Headers, *, streams: bool) -> CallContext:
        """Return the caller of a request. Raise `RequestRefused` if it may not call the method."""
        if self._gate is None:
            return CallContext(headers, None, streams)
        decision = self._gate.judge(b"POST", f"/{SERVICE}/{method}".encode(), headers)
        if decision.refusal is not None:
            raise RequestRefused(decision.refusal)
        return CallContext(headers, decision.account, streams)

    # gRPC interface.

    def _handlers(self) -> dict[str, Any]:
        described = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
        }
        own = {name: self._described(name, method) for name, method in described.items()}
        own["ModelInfer"] = self.model_infer
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(f"{name}Request", method),
                response_serializer=_serialized,
            )
            for name, method in own.items()
        }
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            response_serializer=_serialized,
        )
        return handlers

    def _unary(self, kind: str, method: Callable[[Any, Headers], Awaitable[Any]]) -> Callable[..., Any]:
        """Wrap a unary method, which takes messages of that kind, with the request boundary."""

        async def answer(data: bytes, context: Any) -> Any:
            try:
                await self._calls.turns.next()
                return await method(await received(kind, data), headers_of(context))
            except Exception as error:  # noqa: BLE001 - request boundary: the client gets a status
                await abort(context, error)

        return answer

    def _described(
        self, name: str, method: Callable[[Any, Account | None], Awaitable[Any]]
    ) -> Callable[[Any, Headers], Awaitable[Any]]:
        """Wrap a method that needs a key, but sends no request to a model."""

        async def answer(message: Any, headers: Headers) -> Any:
            account = self._admit(name, headers, streams=False).account
            try:
                return await method(message, account)
            finally:
                if account is not None:
                    account.close()

        return answer

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        decoded = (await received("ModelInferRequest", data) async for data in messages)
        try:
            async with aclosing(decoded), aclosing(self.model_stream_infer(decoded, headers_of(context))) as answers:
                async for answer in answers:
                    yield answer
        except Exception as error:  # noqa: BLE001 - request boundary: the client gets a status
            await abort(context, error)


def _serialized(message: Any) -> bytes:
    """Return a message as bytes, which one with tensors is already."""
    if isinstance(message, Serialized):
        return message.data
    written: bytes = message.SerializeToString()
    return written


def add_kserve(frontend: ServedFrontend, options: KserveOptions) -> KserveService:
    """Add a KServe server, with its port bound, to an embedded frontend. Raise `ConfigError` for a port in use."""
    service = KserveService(frontend.pipeline, frontend.models, frontend.is_sound, options)
    service.bind()
    frontend.servers.append(service)
    return service


async def abort(context: Any, error: Exception) -> None:
    """End a request with the status of its error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status, text = status_of(error)
    if isinstance(error, DynamoException):
        logger.info("request refused", extra={"status": status, "error": str(error)})
    else:
        logger.error("request failed", exc_info=error)
    await context.abort(grpc.StatusCode[status], text)


def headers_of(context: Any) -> list[tuple[bytes, bytes]]:
    """Return the request's metadata as headers."""
    return [
        (key.lower().encode(), value.encode("latin-1", "replace"))
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    ]


def _credentials(options: KserveOptions) -> Any:
    """Return the server's TLS credentials, None without TLS. Raise `ConfigError`."""
    if options.certificate is None or options.key is None:
        return None
    try:
        with open(options.key, "rb") as key, open(options.certificate, "rb") as certificate:
            pairs = [(key.read(), certificate.read())]
        if options.client_ca is None:
            return grpc.ssl_server_credentials(pairs)
        with open(options.client_ca, "rb") as authority:
            return grpc.ssl_server_credentials(pairs, authority.read(), require_client_auth=True)
    except OSError as error:
        raise ConfigError(f"--tls-cert-path {options.certificate}, --tls-key-path {options.key}: {error}") from None
