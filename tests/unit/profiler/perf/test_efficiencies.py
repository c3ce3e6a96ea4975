from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.spec import BACKENDS


def test_every_backend_has_plausible_efficiencies_with_their_errors() -> None:
    assert set(EFFICIENCIES) == set(BACKENDS)
    for one in EFFICIENCIES.values():
        assert 0.3 < one.efficiency.compute < 0.9
        assert 0.5 < one.efficiency.memory <= 0.95
        assert 0 < one.tpot_error < one.ttft_error < 1
        assert "published" in one.source
