"""Simulated schedulers compared with those of the released offline replay, on the same trace."""

import pytest
from benchmarks.replay_peer import FIGURES, Case, compare, difference
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

REQUESTS = 200
EXACT = 0.002
"""A percentile of gaps between tokens is accurate to 0.05 %."""
PREEMPTED = 0.03
"""With preemptions, as a mean over all figures."""


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_engine_has_the_latencies_throughput_and_reuse_of_the_released_simulation(engine: str) -> None:
    cases = [Case(engine, "near"), Case(engine, "over"), Case(engine, "near", blocks="few")]
    near, over, few = compare(require_peer(), cases, REQUESTS).values()
    for figure in FIGURES:
        assert difference(near[figure]) == pytest.approx(0, abs=EXACT), (figure, near[figure])
        assert difference(over[figure]) == pytest.approx(0, abs=EXACT), (figure, over[figure])
    assert sum(abs(difference(few[figure])) for figure in FIGURES) / len(FIGURES) < PREEMPTED


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_disaggregated_engine_has_the_figures_of_the_released_simulation(engine: str) -> None:
    cases = [Case(engine, load, is_disaggregated=True) for load in ("near", "over")]
    for case, found in compare(require_peer(), cases, REQUESTS).items():
        for figure in FIGURES:
            assert difference(found[figure]) == pytest.approx(0, abs=0.01), (case.name, figure, found[figure])
