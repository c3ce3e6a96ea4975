"""ExtProcServer: the gRPC service of Envoy's external processing, and the health service of its probes."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.errors import ConfigError, DynamoException, Overloaded, ResponseTimeout
from dynamo.core.extras import install_command
from dynamo.core.metrics import MetricsRegistry
from dynamo.epp.phases import PickEvent, RequestPhases
from dynamo.epp.picker import EndpointChoice, EndpointPicker
from dynamo.epp.prompts import error_body
from dynamo.serving.errors import answer_to

try:
    from google.protobuf.message import DecodeError

    from dynamo.epp import replies
    from dynamo.epp.messages import CLASSES, SERVICE
    from dynamo.grpc.health import health_methods
    from dynamo.http2.grpc_call import GrpcCall, GrpcCode, GrpcStatus
    from dynamo.http2.grpc_server import GrpcServer
except ImportError:
    raise ConfigError(f"python -m dynamo.epp: requires gRPC; install it: {install_command('grpc')}") from None

logger = logging.getLogger(__name__)

PROBED_SERVICES = frozenset({"", "inference-extension", "liveness", "readiness", SERVICE})
"""Service names that probes ask for; `liveness` is serving whenever the process responds."""
LIVENESS = "liveness"
BODY_DEADLINE_S = 60.0
"""Maximum time for a request's body to arrive, as in the frontend."""
READ_MARGIN_BYTES = 1 << 20
"""One message of the gateway is at most a body and its headers."""
PROBE_BYTES_MAX = 64 << 10
CACHED_TOKEN_BUCKETS = (50, 102, 208, 423, 862, 1757, 3579, 7292, 14856, 30269, 61672, 128000)


class EppMetrics:
    """Metrics of the endpoint picker."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.cached_tokens = registry.histogram(
            "dynamo_epp_cached_tokens",
            "Prompt tokens that the engine reports as cached, per request",
            ("model",),
            CACHED_TOKEN_BUCKETS,
        )
        self.picks = registry.counter(
            "dynamo_epp_picks_total", "Requests by result: picked, or the label of the error", ("result",)
        )
        self.open_requests = registry.gauge(
            "dynamo_epp_open_requests", "Requests whose worker is chosen, until the gateway ends their streams"
        )
        self.pick_seconds = registry.histogram(
            "dynamo_epp_pick_duration_seconds", "Time from a complete request to its destination"
        )


class ExtProcServer:
    """Both services, each on its port."""

    def __init__(
        self,
        picker: EndpointPicker,
        metrics: EppMetrics,
        *,
        inflight_max: int,
        body_bytes_max: int,
        body_deadline_s: float = BODY_DEADLINE_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`inflight_max`: requests whose worker is being chosen; further ones are refused."""
        self._picker = picker
        self._metrics = metrics
        self._inflight_max = inflight_max
        self._body_bytes_max = body_bytes_max
        self._body_deadline_s = body_deadline_s
        self._now = clock or (lambda: asyncio.get_running_loop().time())
        self._inflight = self._open = 0
        metrics.open_requests.labels().follow(lambda: self._open)
        self._is_draining = False
        self._servers: list[GrpcServer] = []
        self.port = self.health_port = 0

    async def start_health(self, host: str, port: int) -> None:
        """Serve the health service, which probes use before workers are known. Raises `StartupError`."""
        server = GrpcServer(health_methods(self._is_serving), message_bytes_max=PROBE_BYTES_MAX)
        self.health_port = await server.listen(host, port, "--grpc-health-port")
        self._servers.append(server)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Serve ext_proc, over TLS if there is a context. Raises `StartupError`."""
        methods = {f"/{SERVICE}/Process": self._process}
        server = GrpcServer(methods, message_bytes_max=self._body_bytes_max + READ_MARGIN_BYTES)
        self.port = await server.listen(host, port, "--grpc-port", tls)
        self._servers.append(server)

    def drain(self) -> None:
        """Report NOT_SERVING, so that gateways turn to other pickers."""
        self._is_draining = True

    async def stop(self, budget_s: float) -> None:
        """Refuse new streams, let those in progress end within the budget, and close."""
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(budget_s) for server in servers))

    def _is_serving(self, service: str) -> bool | None:
        if service not in PROBED_SERVICES:
            return None
        return service == LIVENESS or (self._picker.is_ready and not self._is_draining)

    # ext_proc.

    async def _process(self, call: GrpcCall) -> None:
        """Serve the stream of one HTTP request."""
        failures: list[Exception] = []
        phases = RequestPhases(self._body_bytes_max)
        with ErrorBoundary(failures.append):  # Request boundary: the client gets an error response.
            await self._follow(call, phases)
        for error in failures:
            if isinstance(error, GrpcStatus):
                raise error
            await self._refuse(call, phases.request.path, error)

    async def _follow(self, call: GrpcCall, phases: RequestPhases) -> None:
        """Answer every message of a stream until the gateway ends it."""
        choice: EndpointChoice | None = None
        try:
            while (message := await self._read(call, phases)) is not None:
                responses, event = phases.receive(message)
                if event is PickEvent.PICK:
                    choice = await self._pick(phases)
                    self._open += 1
                    responses = phases.picked(choice.destination, choice.headers)
                elif choice is not None and event is not None:
                    self._progress(choice, phases, event)
                for response in responses:
                    await call.write(response.SerializeToString())
        finally:
            if choice is not None:
                self._open -= 1
                choice.on_end()

    async def _read(self, call: GrpcCall, phases: RequestPhases) -> Any:
        """Return the next message, None at the end of the stream."""
        if not phases.awaits_body:
            return message_of(await call.read())
        try:
            async with asyncio.timeout(self._body_deadline_s):
                return message_of(await call.read())
        except TimeoutError:
            raise ResponseTimeout(f"the request's body did not arrive within {self._body_deadline_s:g} s") from None

    async def _pick(self, phases: RequestPhases) -> EndpointChoice:
        """Choose the worker of a complete request."""
        if self._inflight >= self._inflight_max:
            raise Overloaded(f"{self._inflight} requests wait for a worker (DYN_EPP_MAX_INFLIGHT_REQUESTS)")
        began = self._now()
        self._inflight += 1
        try:
            choice = await self._picker.pick(phases.request)
        finally:
            self._inflight -= 1
        self._metrics.pick_seconds.labels().observe(self._now() - began)
        self._metrics.picks.labels(result="picked").inc()
        return choice

    def _progress(self, choice: EndpointChoice, phases: RequestPhases, event: PickEvent) -> None:
        if event is PickEvent.FIRST_OUTPUT:
            choice.on_first_output()
            return
        cached = phases.cached_tokens
        if cached is not None and choice.model:
            self._metrics.cached_tokens.labels(model=choice.model).observe(cached)
        choice.on_end()

    async def _refuse(self, call: GrpcCall, path: str, error: Exception) -> None:
        answer = answer_to(error)
        self._metrics.picks.labels(result=answer.label).inc()
        if isinstance(error, DynamoException):
            logger.info("request refused", extra={"status": answer.status, "error": str(error)})
        else:
            logger.error("request failed", exc_info=error)
        await call.write(replies.immediate(answer, error_body(path, answer)).SerializeToString())


def message_of(data: bytes | None) -> Any:
    """Return a gateway's message, None for the end of the stream. Raise `GrpcStatus`."""
    if data is None:
        return None
    try:
        return CLASSES["ProcessingRequest"].FromString(data)
    except DecodeError:
        raise GrpcStatus(GrpcCode.INVALID_ARGUMENT, "the message is no ProcessingRequest") from None
