"""SinSynth: rates and shares that swing."""

import random
from pathlib import Path
from statistics import mean

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.sin_synth import SinConfig, main, poisson, rows, swing
from dynamo.replay.trace import read


def test_sine_starts_at_the_lower_level() -> None:
    assert swing(0, 5, 10, 10) == pytest.approx(5)
    assert swing(5, 5, 10, 10) == pytest.approx(10)


def test_arrival_rate_follows_the_sine() -> None:
    found = rows(SinConfig(time_duration=2000, request_rate_min=2, request_rate_max=20, isl_osl_ratio_period=40))
    assert len(found) / 2000 == pytest.approx(11, rel=0.05)
    ebb, flood = (sum(int(row["timestamp"] / 1000) % 10 == second for row in found) for second in (0, 5))
    assert flood > 5 * ebb
    assert mean(row["input_length"] == 100 for row in found) == pytest.approx(0.5, abs=0.05)


def test_request_counts_are_poisson_distributed() -> None:
    rng = random.Random(1)
    found = [poisson(rng, 3.0) for _ in range(5000)]
    assert mean(found) == pytest.approx(3.0, abs=0.1)
    assert mean((count - 3.0) ** 2 for count in found) == pytest.approx(3.0, abs=0.3)


def test_generated_sine_trace_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    assert main(["--time-duration=5", f"--output-file={path}"]) == 0
    assert len(read([str(path)])) > 10


def test_invalid_sine_flags_are_refused() -> None:
    with pytest.raises(ConfigError):
        SinConfig(request_rate_min=20.0)
    with pytest.raises(ConfigError):
        SinConfig(isl1=0)
