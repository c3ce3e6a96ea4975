"""Prefill and decode workers killed or stopped at every point: each request completes once, with the right text."""

import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.processes import DEADLINE_S, wait_until
from tests.integration.faults.disaggregation import (
    Answer,
    FaultInjector,
    Fleet,
    Load,
    fleet,
    reference,
    requests_of,
    send_request,
)
from tests.integration.faults.injection import Freeze, Kill

pytestmark = pytest.mark.integration

BODIES = requests_of(12, random.Random(5))
REQUESTS = 250
"""Requests under random faults; `make test-disagg` sends 10,000."""
LONG = {**BODIES[0], "max_tokens": 200, "min_tokens": 200, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Return the responses of one aggregated worker; the long one last."""
    return reference(tmp_path_factory.mktemp("reference"), [*BODIES, LONG])


class RequestThread(threading.Thread):
    """Request in flight in a thread."""

    def __init__(self, served: Fleet, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._body = body
        self.answer = Answer()
        self.start()

    def run(self) -> None:
        with self._served.client() as client:
            self.answer = send_request(client, self._body)


def under_load(served: Fleet, want: list[Answer], blow: Callable[[], None], total: int = 60) -> Load:
    """Run a load during which a fault occurs; all responses must be right."""
    load = Load(served, BODIES, want, total, seed=1)
    load.start(6)
    wait_until(lambda: load.done >= total // 6, "the load did not begin")
    blow()
    wait_until(lambda: load.is_over, "the load never ended", 3 * DEADLINE_S)
    assert load.wrong == []
    assert load.done == total
    return load


def test_fault_free_run_loses_and_recomputes_nothing(tmp_path: Path, want: list[Answer]) -> None:
    with fleet(tmp_path / "fleet", prefill=1, decode=1) as served:
        under_load(served, want, lambda: None)
        figures = served.figures()
        assert figures["kv_fetches_total shm ok"] + figures["kv_fetches_total nixl ok"] > 0
        assert not [name for name in figures if name.startswith("local_prefills")]
        wait_until(lambda: served.figures()["held blocks"] == 0, "blocks are still held")


def test_killed_prefill_worker_fails_no_request(tmp_path: Path, want: list[Answer]) -> None:
    """In any state: computing, holding, sending."""
    with fleet(tmp_path / "fleet", flags=("--kv-transfer", "tcp")) as served:
        under_load(served, want, lambda: served.kill(served.of("prefill")[0]))


def test_requests_survive_the_death_of_the_last_prefill_worker(tmp_path: Path, want: list[Answer]) -> None:
    with fleet(tmp_path / "fleet", prefill=1, decode=1) as served:
        under_load(served, want, lambda: served.kill(served.of("prefill")[0]))
        assert served.figures()["local_prefills_total told"] > 0


def test_unresponsive_prefill_worker_does_not_block_requests(tmp_path: Path, want: list[Answer]) -> None:
    with fleet(tmp_path / "fleet", flags=("--kv-transfer", "tcp")) as served:
        victim = served.of("prefill")[0].process
        under_load(served, want, lambda: Freeze(victim).verify())
        victim.send_signal(signal.SIGCONT)


def test_streams_survive_a_killed_decode_worker(tmp_path: Path, want: list[Answer]) -> None:
    with fleet(tmp_path / "fleet") as served:
        streams: list[RequestThread] = []
        victim = served.of("decode")[0]

        def has_stream() -> bool:
            """Send four streams at a time, until one of them is seen at the worker."""
            if not any(stream.is_alive() for stream in streams):
                streams.extend(RequestThread(served, LONG) for _ in range(4))
            return served.series(victim, "dynamo_component_inflight_requests") > 0

        wait_until(has_stream, "the worker never had a stream")
        Kill(victim.process)
        served.workers.remove(victim)
        for stream in streams:
            stream.join(60)
            assert stream.answer.same_as(want[-1]), stream.answer


def test_workers_killed_at_random_under_load(tmp_path: Path, want: list[Answer]) -> None:
    with fleet(tmp_path / "fleet") as served:
        load = Load(served, BODIES, want, REQUESTS, seed=2)
        trouble = FaultInjector(served, 2.0, seed=4, transports=["shm", "tcp"])
        load.start(8)
        trouble.run(load)
        assert load.wrong == []
        assert load.done == REQUESTS
        assert trouble.made.total() > 0
