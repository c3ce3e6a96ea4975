from dynamo.profiler.perf.analytic_engine import Efficiency
from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.points import Correction

PUBLISHED = EstimateError(itl=0.11, ttft=0.34, source="published points")


def test_errors_of_a_correction_are_those_on_points_left_out() -> None:
    found = PUBLISHED.corrected(
        Correction(efficiency=Efficiency(), source="5 closed loops of a.json", ttft_error=0.1, itl_error=0.03)
    )
    assert (found.itl, found.ttft) == (0.03, 0.1)
    assert found.source == "published points, corrected by 5 closed loops of a.json"


def test_errors_stay_where_too_few_points_are_given() -> None:
    found = PUBLISHED.corrected(Correction(efficiency=Efficiency(), source="1 point", ttft_error=None, itl_error=None))
    assert (found.itl, found.ttft) == (0.11, 0.34)
    assert found.text() == "TTFT ±34 %, ITL ±11 %"
