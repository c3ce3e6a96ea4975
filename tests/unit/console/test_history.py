"""History of samples: rates and percentiles of successive totals, bounded, and interrupted by pauses."""

from dynamo.console.history import SampleHistory
from dynamo.console.totals import Buckets, ModelTotals


def totals(requests: float, tokens: float = 0.0, waits: tuple[float, ...] = (0.0, 0.0, 0.0)) -> dict[str, ModelTotals]:
    return {
        "m": ModelTotals(succeeded=requests, output_tokens=tokens, in_flight=1, ttft=Buckets([0.1, 1.0], [*waits], 0))
    }


def test_first_totals_have_no_rates() -> None:
    assert SampleHistory().add(0.0, totals(5)) is None


def test_rates_are_averages_of_the_last_seconds() -> None:
    history = SampleHistory()
    for second in range(6):
        sample = history.add(float(second), totals(2 * second, 30 * second))
    assert sample is not None
    assert (sample.models["m"].requests, sample.models["m"].output_tokens, sample.total.requests) == (2.0, 30.0, 2.0)
    assert sample.total.in_flight == 1


def test_percentiles_are_those_of_the_window() -> None:
    history = SampleHistory()
    history.add(0.0, totals(0, waits=(100, 0, 0)))
    sample = history.add(1.0, totals(10, waits=(100, 10, 0)))
    assert sample is not None
    assert sample.total.ttft.p50 == 550.0
    assert sample.total.itl.p50 is None


def test_history_restarts_after_a_pause() -> None:
    history = SampleHistory()
    history.add(0.0, totals(0))
    history.add(1.0, totals(1))
    assert history.add(100.0, totals(500)) is None
    sample = history.add(101.0, totals(501))
    assert sample is not None
    assert sample.total.requests == 1.0
    assert len(history.samples) == 2


def test_history_is_bounded() -> None:
    history = SampleHistory(samples_max=3)
    for second in range(10):
        history.add(float(second), totals(second))
    assert [one.at for one in history.last(100)] == [7.0, 8.0, 9.0]
    assert [one.at for one in history.last(1)] == [9.0]


def test_a_restarted_process_does_not_cause_negative_rates() -> None:
    history = SampleHistory()
    history.add(0.0, totals(100))
    sample = history.add(1.0, totals(3))
    assert sample is not None
    assert sample.total.requests == 0.0


def test_new_model_has_rates_from_its_first_sample() -> None:
    history = SampleHistory()
    history.add(0.0, {})
    sample = history.add(1.0, totals(4))
    assert sample is not None
    assert sample.models["m"].requests == 4.0
