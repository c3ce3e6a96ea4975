"""Frontend scraper: which frontends it reads, and the causes of unknown traffic."""

import logging

import msgspec
import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import Unknown
from dynamo.planner.observation import scrape
from dynamo.planner.observation.scrape import FrontendScraper
from dynamo.protocols.discovery import METRICS_SOURCES, MetricsAddress
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore


class UnconnectedClient:
    """HTTP client whose host cannot be reached."""

    origins: list[str] = []

    def __init__(self, origin: str, *args: object, **more: object) -> None:
        self.origins.append(origin)

    def request(self, method: str, path: str) -> object:
        raise ConnectionRefusedError(f"{method} {path}")

    def close(self) -> None:
        pass


@pytest.fixture
def origins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(scrape, "HttpClient", UnconnectedClient)
    monkeypatch.setattr(UnconnectedClient, "origins", [])
    return UnconnectedClient.origins


async def put(discovery: MemoryDiscovery, number: int, url: str, namespace: str, component: str = "frontend") -> None:
    address = MetricsAddress(component, url, number, namespace)
    await discovery.put(METRICS_SOURCES, str(number), msgspec.json.encode(address))


async def test_frontends_of_the_namespace_are_read_once_for_each_url(origins: list[str]) -> None:
    discovery, clock = MemoryDiscovery(MemoryStore()), ManualClock()
    for number, (url, namespace) in enumerate([("a", "ns"), ("a", "ns"), ("b", ""), ("c", "other")]):
        await put(discovery, number, f"http://{url}:80/metrics", namespace)
    await put(discovery, 9, "http://d:80/metrics", "ns", "worker")
    scraper = FrontendScraper(discovery, "ns", clock)
    await scraper.sample()
    await scraper.sample()
    assert origins == ["http://a:80", "http://b:80"]
    clock.advance(5)
    found = await scraper.window(5.0)
    assert found.unknown == "metrics of http://a:80/metrics, http://b:80/metrics could not be read"
    await scraper.close()


async def test_departed_frontend_does_not_make_the_window_incomplete(origins: list[str]) -> None:
    discovery, clock = MemoryDiscovery(MemoryStore()), ManualClock()
    await put(discovery, 1, "http://a:80/metrics", "ns")
    scraper = FrontendScraper(discovery, "ns", clock)
    await scraper.sample()
    await discovery.delete(METRICS_SOURCES, "1")
    await scraper.sample()
    clock.advance(5)
    assert (await scraper.window(5.0)).unknown == "no frontend registers its metrics"


async def test_malformed_address_is_logged_and_skipped(origins: list[str], caplog: pytest.LogCaptureFixture) -> None:
    discovery = MemoryDiscovery(MemoryStore())
    await discovery.put(METRICS_SOURCES, "1", b"{")
    with caplog.at_level(logging.WARNING):
        await FrontendScraper(discovery, "ns", ManualClock()).sample()
    assert "malformed metrics source 1" in caplog.text and origins == []


async def test_too_many_frontends_are_an_error(origins: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "SOURCES_MAX", 1)
    discovery = MemoryDiscovery(MemoryStore())
    for number in range(2):
        await put(discovery, number, f"http://h{number}:80/metrics", "ns")
    with pytest.raises(Unknown, match="2 frontends are registered: must be at most 1"):
        await FrontendScraper(discovery, "ns", ManualClock()).sample()
