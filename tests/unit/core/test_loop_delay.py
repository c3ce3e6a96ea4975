"""LoopDelay: a loop that is late shows it."""

import threading

from tests.settle import turns, until

from dynamo.core.loop_delay import LoopDelay
from dynamo.core.metrics import MetricsRegistry


def value(registry: MetricsRegistry, series: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in registry.render().splitlines() if not line.startswith("#"))
    return float(lines[series])


async def test_loop_delay_counts_delays_and_reports_long_ones_as_stalls() -> None:
    registry = MetricsRegistry()
    delay = LoopDelay(registry, "dynamo_frontend")
    for late_s in (-0.001, 0.0005, 0.04, 0.3):
        delay.observe(late_s)
    assert value(registry, "dynamo_frontend_event_loop_delay_seconds_count") == 4
    assert value(registry, 'dynamo_frontend_event_loop_delay_seconds_bucket{le="0.001"}') == 2
    assert value(registry, "dynamo_frontend_event_loop_stall_total") == 1


async def test_loop_delay_reports_a_blocking_callback_as_a_stall() -> None:
    registry = MetricsRegistry()
    delay = LoopDelay(registry, "p")
    delay.start()
    await turns()
    threading.Event().wait(0.16)  # The fault itself: it blocks the loop.
    await until(lambda: value(registry, "p_event_loop_delay_seconds_count"))
    delay.close()
    assert value(registry, "p_event_loop_stall_total") == 1
