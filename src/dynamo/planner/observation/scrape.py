"""Frontend scraper: the traffic of the frontends that discovery lists, from their `/metrics`."""

import asyncio
import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

from dynamo.core.clock import Clock
from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import DynamoException, Unknown
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.planner.observation.exposition import SeriesKey, samples_of
from dynamo.planner.observation.traffic import NAMES, ObservedTraffic, RouterQueues, TrafficWindow
from dynamo.protocols.discovery import METRICS_SOURCES, MetricsAddress
from dynamo.runtime.discovery.base import Discovery

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 20  # An exposition of ten thousand series is about 2 MB.
SCRAPE_S = 3.0  # Below the default tick interval of 5 s.
SOURCES_MAX = 256  # Frontends of one deployment; more records than this are a fault.
FRONTEND = "frontend"
_read_address = json_decoder(MetricsAddress).decode


class FrontendScraper:
    """Traffic without Prometheus. `sample` reads all frontends once, `window` ends the interval."""

    def __init__(self, discovery: Discovery, namespace: str, clock: Clock, model_name: str | None = None) -> None:
        self._discovery = discovery
        self._namespace = namespace
        self._clock = clock
        self._traffic = TrafficWindow(clock.now(), model_name)
        self._clients: dict[str, HttpClient] = {}

    async def sample(self) -> None:
        """Read every frontend; one that does not respond makes the window incomplete until it does."""
        urls = await self._urls()
        self._traffic.retain(urls)
        for url in [one for one in self._clients if one not in urls]:
            self._clients.pop(url).close()
        await asyncio.gather(*(self._read(url) for url in sorted(urls)))

    async def window(self, interval_s: float) -> ObservedTraffic:
        """Return the traffic since the last known window, after `sample`."""
        return self._traffic.close(self._clock.now(), interval_s)

    def queues(self) -> RouterQueues:
        """Return the routers' queues at the last `sample`."""
        return self._traffic.queues()

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def _urls(self) -> set[str]:
        """Return the URLs of the frontends of this namespace; several processes may share one."""
        found: set[str] = set()
        for key, value in (await self._discovery.snapshot(METRICS_SOURCES)).items():
            try:
                address = _read_address(value)
            except UNREADABLE as error:
                logger.warning("malformed metrics source %s: %s", key, error)
                continue
            if address.component == FRONTEND and address.namespace in ("", self._namespace):
                found.add(address.url)
        if len(found) > SOURCES_MAX:
            raise Unknown(f"{len(found)} frontends are registered: must be at most {SOURCES_MAX}")
        return found

    async def _read(self, url: str) -> None:
        try:
            samples = await self._scrape(url)
        except (DynamoException, OSError) as error:
            logger.warning("failed to read the metrics of %s: %s", url, error)
            self._traffic.fail(url)
        else:
            self._traffic.read(url, samples, self._clock.now())

    async def _scrape(self, url: str) -> Mapping[SeriesKey, float]:
        parts = urlsplit(url)
        client = self._clients.get(url)
        if client is None:
            deadlines = Deadlines(SCRAPE_S, SCRAPE_S, SCRAPE_S, SCRAPE_S)
            origin = f"{parts.scheme}://{parts.netloc}"
            client = self._clients[url] = HttpClient(origin, deadlines, setting="metrics source")
        async with client.request("GET", parts.path or "/metrics") as response:
            body = await response.read(BODY_BYTES_MAX)
            if response.status != 200:
                raise Unknown(f"status {response.status}")
        samples = samples_of(body.decode(errors="replace"), NAMES)
        if not samples:
            raise Unknown("no metric of a frontend")
        return samples
