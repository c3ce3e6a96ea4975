"""Scrapes of the metrics of thousands of workers, which must leave the event loop to others meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core import amortized
from dynamo.core.metrics import MetricsRegistry

SERIES = 2000


def fill(registry: MetricsRegistry) -> None:
    """Add `SERIES` series."""
    family = registry.gauge("load", "Load of a worker", ["worker"])
    for worker in range(SERIES):
        family.labels(worker=str(worker)).set(worker)


async def turns_during(scrape: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often another task gets a turn before the scrape ends, if a turn is over after one series."""
    monkeypatch.setattr(amortized, "TURN_S", 0.0)
    task, count = asyncio.create_task(scrape), 0
    while not task.done():
        count += 1
        await turns()
    await task
    return count
