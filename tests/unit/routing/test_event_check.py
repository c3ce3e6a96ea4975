"""Missing KV events are reported, and the caches of their workers predicted until events arrive."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.metrics import Gauge
from dynamo.kv_events.subscriber import KvView
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.router import Router, WorkerFacts
from dynamo.protocols.discovery import EndpointId
from dynamo.routing.event_check import SILENT_S, EventCheck


class Checked:
    """A check of a router with two workers, on a clock of its own."""

    def __init__(self, *, has_view: bool = True, workers: int = 2) -> None:
        self.machine = Router(RoutingConfig(block_size=4), random.Random(0))
        for number in range(workers):
            self.machine.set_worker(WorkerFacts(number))
        self.view: Any = SimpleNamespace(has_sources=False)
        self.gauge, self.clock = Gauge(), ManualClock()
        view = cast("KvView", self.view) if has_view else None
        endpoint = EndpointId.parse("dynamo.backend.generate")
        self.check = EventCheck(endpoint, self.machine, view, self.gauge, self.clock)

    def pass_time(self, seconds: float) -> None:
        """Let time pass between two decisions."""
        self.check.check()
        self.clock.advance(seconds)
        self.check.check()


def test_caches_are_predicted_while_no_event_source_is_registered(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked()
    checked.pass_time(SILENT_S)
    assert not checked.check.is_predicting and checked.gauge.value == 0
    checked.pass_time(0.1)
    assert checked.check.is_predicting and checked.machine.predicted is not None
    assert checked.gauge.value == 2
    assert "no KV events from 2 worker(s)" in caplog.text

    checked.view.has_sources = True
    checked.pass_time(0)
    assert not checked.check.is_predicting and checked.machine.predicted is None
    assert checked.gauge.value == 0
    assert "workers publish KV events now" in caplog.text


def test_the_time_without_sources_counts_from_the_latest_loss_of_all() -> None:
    checked = Checked()
    checked.pass_time(SILENT_S - 1)
    checked.view.has_sources = True
    checked.pass_time(0)
    checked.view.has_sources = False
    checked.pass_time(SILENT_S - 1)
    assert not checked.check.is_predicting
    checked.pass_time(2)
    assert checked.check.is_predicting


@pytest.mark.parametrize(
    "checked", [Checked(has_view=False), Checked(workers=0)], ids=["no subscription", "no workers"]
)
def test_nothing_is_predicted_without_a_subscription_or_without_workers(checked: Checked) -> None:
    checked.pass_time(10 * SILENT_S)
    assert not checked.check.is_predicting
