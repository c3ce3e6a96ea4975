from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamo.profiler.thorough.journal import Measurement, MeasurementJournal
from dynamo.profiler.thorough.load import LoadSample
from dynamo.profiler.thorough.measuring import EngineMeter, prefill_concurrency, summarized

WANTED = Measurement(engine="tp1", kind="decode", isl=100, osl=11, concurrency=2)


class ScriptedLoad:
    """Load generator whose results are given."""

    def __init__(self, samples: Sequence[LoadSample]) -> None:
        self.samples = list(samples)
        self.runs: list[tuple[int, int, int, bool]] = []
        self.warmups = 0

    async def warm_up(self, isl: int, osl: int, requests: int) -> None:
        self.warmups += requests

    async def run(self, isl: int, osl: int, concurrency: int, *, repeats: bool) -> LoadSample:
        self.runs.append((isl, osl, concurrency, repeats))
        return self.samples.pop(0)


def test_rate_is_that_while_all_answers_are_running() -> None:
    found = summarized(WANTED, LoadSample(answered=2, ttft_ms=50, itl_ms=10))
    assert (found.ttft_ms, found.itl_ms, found.tok_s) == (50, 10, pytest.approx(200))


def test_measurement_with_unanswered_requests_is_an_error() -> None:
    assert summarized(WANTED, LoadSample(answered=1, ttft_ms=40)).error == "1 requests were not answered"


async def test_data_parallel_engines_get_a_burst_of_prompts(tmp_path: Path) -> None:
    """Four prompts of 60 ms per rank, and four steps of 10 ms between two of them."""
    load = ScriptedLoad([LoadSample(answered=8, ttft_ms=150, last_ttft_ms=4 * 60 + 3 * 4 * 10, itl_ms=10)])
    meter = EngineMeter(load, MeasurementJournal.opened(tmp_path), "dep2", ranks=2)
    await meter.warm_up()
    found = await meter.prefill(1000)
    assert load.runs == [(1000, 5, 8, False)]
    assert load.warmups == 6
    assert found.ttft_ms == pytest.approx(60)


async def test_burst_whose_prompts_share_steps_is_divided(tmp_path: Path) -> None:
    load = ScriptedLoad([LoadSample(answered=8, ttft_ms=50, last_ttft_ms=80, itl_ms=10)])
    found = await EngineMeter(load, MeasurementJournal.opened(tmp_path), "dep2", ranks=2).prefill(1000)
    assert found.ttft_ms == pytest.approx(20)


async def test_finished_measurements_are_not_made_again_and_failed_ones_are(tmp_path: Path) -> None:
    load = ScriptedLoad([LoadSample(answered=1, ttft_ms=9), LoadSample(answered=0), LoadSample(answered=2, itl_ms=5)])
    journal = MeasurementJournal.opened(tmp_path)
    meter = EngineMeter(load, journal, "tp1")
    assert (await meter.prefill(100)).ttft_ms == 9
    assert (await meter.decode(100, 10, 2)).error
    again = EngineMeter(load, MeasurementJournal.opened(tmp_path), "tp1")
    assert (await again.prefill(100)).ttft_ms == 9
    assert (await again.decode(100, 10, 2)).itl_ms == 5
    assert [run[3] for run in load.runs] == [False, True, True]


@pytest.mark.parametrize(("ranks", "prompts"), [(1, 1), (2, 8), (8, 32)])
def test_prompts_of_a_prefill_measurement(ranks: int, prompts: int) -> None:
    assert prefill_concurrency(ranks) == prompts
