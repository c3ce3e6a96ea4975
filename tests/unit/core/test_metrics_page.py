"""Metrics of thousands of workers are rendered in turns, once for all scrapers of the same time."""

import asyncio
import threading

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from tests.scrapes import SERIES, fill, turns_during
from tests.settle import turns

from dynamo.core import amortized
from dynamo.core.metrics import CONTENT_TYPE, MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.core.openmetrics import OPENMETRICS_TYPE


@pytest.fixture
def registry() -> MetricsRegistry:
    registry = MetricsRegistry()
    fill(registry)
    return registry


async def test_page_has_the_text_of_the_registry(registry: MetricsRegistry) -> None:
    assert await MetricsPage(registry).respond("") == (CONTENT_TYPE, registry.render().encode())


async def test_page_in_openmetrics_has_all_samples_and_an_end(registry: MetricsRegistry) -> None:
    content_type, body = await MetricsPage(registry).respond("application/openmetrics-text")
    (family,) = read_openmetrics(body.decode())
    assert content_type == OPENMETRICS_TYPE
    assert [sample.value for sample in family.samples] == list(range(SERIES))


async def test_other_tasks_run_while_a_page_is_rendered(
    registry: MetricsRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await turns_during(MetricsPage(registry).respond(""), monkeypatch) > SERIES / 2


async def test_text_of_another_source_is_made_in_a_thread(registry: MetricsRegistry) -> None:
    threads: list[threading.Thread] = []

    def text() -> str:
        threads.append(threading.current_thread())
        return "engine_steps 1"

    registry.add_text(text)
    assert (await MetricsPage(registry).respond(""))[1].endswith(b"\nengine_steps 1\n")
    assert threads and threading.current_thread() not in threads


async def test_scrapes_at_the_same_time_share_one_rendering(
    registry: MetricsRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amortized, "TURN_S", 0.0)
    calls: list[None] = []
    registry.add_text(lambda: calls.append(None) or "engine_steps 1\n")
    page = MetricsPage(registry)
    bodies = await asyncio.gather(*(page.respond("") for _ in range(64)))
    assert len(set(bodies)) == 1 and len(calls) == 1
    registry.counter("later_total", "Declared after them").labels().inc()
    assert b"later_total 1" in (await page.respond(""))[1], "a later scrape has later values"


async def test_scraper_that_disconnects_does_not_end_the_scrape_of_another_one(
    registry: MetricsRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amortized, "TURN_S", 0.0)
    page = MetricsPage(registry)
    first, second = (asyncio.create_task(page.respond("")) for _ in range(2))
    await turns(5)
    first.cancel()
    assert (await second)[1].count(b"\nload{") == SERIES
    assert first.cancelled()


async def test_workers_that_leave_while_a_page_is_rendered_are_left_out(
    registry: MetricsRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amortized, "TURN_S", 0.0)
    task = asyncio.create_task(MetricsPage(registry).respond(""))
    await turns(10)
    registry.gauge("load", "Load of a worker", ["worker"]).remove(worker=str(SERIES - 1))
    assert f'worker="{SERIES - 1}"'.encode() not in (await task)[1]


async def test_failure_of_a_source_is_that_of_the_scrape_and_ends_with_it(registry: MetricsRegistry) -> None:
    answers = ["fails"]

    def text() -> str:
        if answers:
            raise RuntimeError(answers.pop())
        return "engine_steps 1"

    registry.add_text(text)
    page = MetricsPage(registry)
    with pytest.raises(RuntimeError, match="fails"):
        await page.respond("")
    assert b"\nengine_steps 1\n" in (await page.respond(""))[1]


async def test_texts_of_other_processes_are_added(registry: MetricsRegistry) -> None:
    async def combine(own: str) -> str:
        return own + "others 1\n"

    page = MetricsPage(registry, combine)
    assert (await page.respond(""))[1].endswith(b"\nothers 1\n")
    assert "others" not in await page.own()
