"""Prometheus client: the traffic of an interval from a Prometheus server."""

import logging
import math
import ssl
from collections.abc import Iterable
from urllib.parse import urlencode

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import ConfigError, NotReady, Unknown
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.planner.config.planner_config import MetricsSource, PlannerConfig
from dynamo.planner.observation import queries
from dynamo.planner.observation.exposition import SeriesKey
from dynamo.planner.observation.queries import QueryReply, QueryRow, Selection
from dynamo.planner.observation.traffic import ObservedTraffic, RouterQueues, queues_of
from dynamo.protocols.planner import TrafficObservation

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 20
MEANS = (
    "input_sequence_tokens",
    "output_sequence_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_duration_seconds",
)
_read_reply = json_decoder(QueryReply).decode


class PrometheusTraffic:
    """Traffic of the deployment as a Prometheus server has stored it."""

    def __init__(self, config: PlannerConfig, namespace: str, component: str = "backend") -> None:
        """Prepare the client. Raise `ConfigError` for an invalid URL or CA bundle."""
        limit_s = config.metric_pulling_prometheus_request_timeout_seconds
        url = config.metric_pulling_prometheus_endpoint
        self._client = HttpClient(
            url,
            Deadlines(limit_s, limit_s, limit_s, limit_s),
            setting="metric_pulling_prometheus_endpoint",
            tls=_tls(config) if url.startswith("https:") else None,
        )
        self._config = config
        self._component = component
        self.model_name = config.model_name
        self._namespace = namespace
        self._queues = RouterQueues()

    async def sample(self) -> None:
        """Read the routers' queues. Raise `WorkerUnavailable` or `Unknown` if the server cannot be queried."""
        self._queues = RouterQueues()
        rows = Selection(self._namespace, self.model_name).chosen(await self._query(queries.ROUTER_QUEUES))
        self._queues = queues_of((series(row), number) for row in rows if math.isfinite(number := row.number()))

    def queues(self) -> RouterQueues:
        """Return the routers' queues at the last `sample`."""
        return self._queues

    async def window(self, interval_s: float) -> ObservedTraffic:
        """Return the traffic of the last interval. Raise `WorkerUnavailable` or `Unknown` if it cannot be queried."""
        window, selection = f"{round(interval_s)}s", Selection(self._namespace, self.model_name)
        requests = await self._requests(window, selection)
        if requests is None:
            return ObservedTraffic(unknown=self._no_counter())
        isl, osl, ttft, itl, duration = [await self._mean(name, window, selection) for name in MEANS]
        if requests > 0 and (isl is None or osl is None):
            return ObservedTraffic(unknown="Prometheus has no request lengths of the window")
        return ObservedTraffic(
            traffic=TrafficObservation(
                duration_s=interval_s,
                num_req=requests,
                isl=isl or 0.0,
                osl=osl or 0.0,
                kv_hit_rate=await self._hit_rate(window, selection),
                accept_length=await self._accept_length(window),
            ),
            ttft_ms=None if ttft is None else ttft * 1000,
            itl_ms=None if itl is None else itl * 1000,
            request_duration_s=duration,
        )

    async def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _no_counter(self) -> str:
        """Return why the number of requests is unknown."""
        if self._config.throughput_metrics_source is MetricsSource.ROUTER:
            return f"Prometheus has no request counter of a router of namespace {self._namespace}"
        model = "" if self.model_name is None else f' and model="{self.model_name}"'
        return (
            f'Prometheus has no dynamo_frontend_{queries.ENDED} with dynamo_namespace="{self._namespace}"{model}; '
            "the scrape configuration must add the namespace to the frontends"
        )

    async def _requests(self, window: str, selection: Selection) -> float | None:
        if self._config.throughput_metrics_source is MetricsSource.ROUTER:
            for query in queries.router_requests(window, selection.router_label):
                found = total(await self._query(query))
                if found is not None:
                    return found
            return None
        for counter in (queries.STARTED, queries.ENDED):
            rows = selection.chosen(await self._query(queries.frontend_requests(counter, window)))
            found = total(rows)
            if found is not None:
                return found
        return None

    async def _mean(self, name: str, window: str, selection: Selection) -> float | None:
        if self._config.throughput_metrics_source is MetricsSource.ROUTER:
            return single(await self._query(queries.router_mean(name, window, selection.router_label)))
        return single(selection.chosen(await self._query(queries.frontend_mean(name, window))))

    async def _hit_rate(self, window: str, selection: Selection) -> float | None:
        return single(await self._query(queries.router_mean("kv_hit_rate", window, selection.router_label)))

    async def _accept_length(self, window: str) -> float | None:
        selector = queries.worker_selector(self._namespace, self._component, self.model_name)
        query = queries.accept_length(self._config.backend, window, selector)
        return None if query is None else single(await self._query(query))

    async def _query(self, query: str) -> list[QueryRow]:
        parameters = {"query": query, **(self._config.metric_pulling_prometheus_extra_query_params or {})}
        async with self._client.request(
            "GET", f"/api/v1/query?{urlencode(parameters)}", headers=self._authorization()
        ) as response:
            body = await response.read(BODY_BYTES_MAX)
            status = response.status
        try:
            reply = _read_reply(body)
        except UNREADABLE:
            raise Unknown(f"Prometheus responded with status {status} and no query result") from None
        if reply.status != "success" or reply.data is None:
            raise NotReady(f"Prometheus refused the query {query}: {reply.error_type} {reply.error}")
        rows: list[QueryRow] = reply.data.result
        return rows

    def _authorization(self) -> dict[str, str]:
        """Return the header with the token; its file is read for each request, because tokens are rotated."""
        token, path = (
            self._config.metric_pulling_prometheus_token,
            self._config.metric_pulling_prometheus_token_file,
        )
        if path:
            try:
                with open(path, encoding="utf-8") as file:
                    token = file.read().strip()
            except OSError as error:
                raise Unknown(f"metric_pulling_prometheus_token_file {path}: {error.strerror}") from None
        return {"authorization": f"Bearer {token}"} if token else {}


def series(row: QueryRow) -> SeriesKey:
    """Return name and labels of a row."""
    labels = tuple(sorted((name, value) for name, value in row.metric.items() if name != "__name__"))
    return SeriesKey(row.metric.get("__name__", ""), labels)


def total(rows: Iterable[QueryRow]) -> float | None:
    """Return the sum of the finite rows; None without any."""
    found = [number for one in rows if math.isfinite(number := one.number())]
    return sum(found) if found else None


def single(rows: Iterable[QueryRow]) -> float | None:
    """Return the first finite row; None without any, such as the mean of no request."""
    return next((number for one in rows if math.isfinite(number := one.number())), None)


def _tls(config: PlannerConfig) -> ssl.SSLContext:
    bundle = config.metric_pulling_prometheus_ca_bundle
    try:
        context = ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise ConfigError(f"metric_pulling_prometheus_ca_bundle {bundle}: {error.strerror or error}") from None
    if not config.metric_pulling_prometheus_ssl_verify and bundle is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
