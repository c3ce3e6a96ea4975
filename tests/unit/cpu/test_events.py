from typing import Any

from dynamo.cpu.events import LOAD_INTERVAL_S, Reporter
from dynamo.protocols.kv_events import Cleared, Removed
from dynamo.protocols.load import ForwardPass, WorkerLoad


class Host:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def publish_kv_event(self, event: Any, dp_rank: int = 0) -> None:
        self.told.append(event)

    def publish_load(self, load: WorkerLoad) -> None:
        self.told.append(load)

    def publish_forward_pass(self, passed: ForwardPass, dp_rank: int = 0) -> None:
        self.told.append(passed)

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


BUSY, BUSIER, IDLE = (WorkerLoad(running_requests=count) for count in (1, 2, 0))


def told(*reports: tuple[WorkerLoad, float, bool]) -> list[Any]:
    host = Host()
    reporter = Reporter(host)
    for load, now, is_idle in reports:
        reporter.report([], load, now, is_idle=is_idle)
    return host.told


def test_event_sender_publishes_events_in_order() -> None:
    host = Host()
    Reporter(host).report([Removed([1]), Cleared()], BUSY, 0.0, is_idle=False)
    assert host.told == [Removed([1]), Cleared(), BUSY]


def test_event_sender_publishes_an_unchanged_load_once() -> None:
    assert told((BUSY, 0.0, False), (BUSY, 10.0, False), (BUSY, 20.0, True)) == [BUSY]


def test_event_sender_throttles_frequent_loads() -> None:
    early, late = LOAD_INTERVAL_S / 2, LOAD_INTERVAL_S * 1.5
    assert told((BUSY, 0.0, False), (BUSIER, early, False), (BUSIER, late, False)) == [BUSY, BUSIER]


def test_event_sender_always_publishes_the_last_load() -> None:
    assert told((BUSY, 0.0, False), (IDLE, LOAD_INTERVAL_S / 10, True)) == [BUSY, IDLE]
