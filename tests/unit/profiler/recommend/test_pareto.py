import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

from dynamo.profiler.recommend.estimate import EstimateError
from dynamo.profiler.recommend.pareto import pareto_page
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult

MakeCandidate = Callable[..., CandidateDeployment]
MakeResult = Callable[..., SimulatedResult]
ESTIMATE = EstimateError(itl=0.1, ttft=0.3, source="12 points")


def test_every_deployment_is_a_point_with_its_name(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    results = [result_of(candidate_of(2)), result_of(candidate_of(4)), result_of(candidate_of(1, 1), 0.5)]
    page = pareto_page(results, results[0], 0.95, ESTIMATE)
    titles = re.findall(r"<title>([^<]+): \d+ tok/s per GPU", page)
    assert titles == [one.candidate.label() for one in results]
    assert page.count("r=10") == 1
    assert "TTFT ±30 %, ITL ±10 %" in page


def test_one_deployment_is_enough(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    only = result_of(candidate_of(2))
    page = pareto_page([only], only, 0.95, ESTIMATE)
    assert "(recommended)" in page
    svg = re.search(r"<svg.*</svg>", page)
    assert svg is not None
    quoted = re.sub(r"=([^\s'>/]+)", r"='\1'", svg[0].replace(" />", "/>"))
    assert ET.fromstring(quoted).tag == "svg"


def test_overloaded_deployments_are_left_out_of_the_plot(candidate_of: MakeCandidate, result_of: MakeResult) -> None:
    best = result_of(candidate_of(2))
    overloaded = replace(result_of(candidate_of(1), 0.1), e2e_ms=100 * best.e2e_ms)
    page = pareto_page([best, overloaded], best, 0.95, ESTIMATE)
    assert page.count("<title>aggregated") == 1
    assert "1 overloaded" in page
