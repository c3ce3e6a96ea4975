"""Interpolation of profiles: exact at the measured points, bounded around them."""

import builtins
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.core.interpolation import DecodeInterpolator, DecodeProfile, PrefillInterpolator, PrefillProfile

ISL = [100.0, 500.0, 1000.0, 2000.0, 4000.0]
PREFILL = PrefillProfile(
    isl=ISL, ttft_ms=[10 + 0.05 * one + 1e-5 * one * one for one in ISL], thpt_per_gpu=[one * 20 for one in ISL]
)
LOADS = [(usage, context) for usage in (0.05, 0.25, 0.5, 0.75, 0.95) for context in (500.0, 2000.0, 4000.0)]
DECODE = DecodeProfile(
    kv_usage=[usage for usage, _ in LOADS],
    context_length=[context for _, context in LOADS],
    itl_ms=[5 + 20 * usage for usage, _ in LOADS],
    thpt_per_gpu=[1000 * usage for usage, _ in LOADS],
    max_kv_tokens=100_000,
)


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("scipy")


def test_prefill_follows_a_quadratic_between_the_measured_lengths() -> None:
    found = PrefillInterpolator(PREFILL)
    for isl in (100.0, 750.0, 3333.0, 4000.0):
        assert found.interpolate_ttft(isl) == pytest.approx(10 + 0.05 * isl + 1e-5 * isl * isl)


def test_prefill_outside_the_measured_lengths_is_that_of_the_nearest_one() -> None:
    found = PrefillInterpolator(PREFILL)
    assert found.interpolate_ttft(1.0) == found.interpolate_ttft(100.0)
    assert found.interpolate_thpt_per_gpu(1e9) == pytest.approx(80_000)
    assert found.capacity_rps(2000.0, 2) == pytest.approx(40.0)


def test_decode_follows_the_measured_loads_within_a_cell_of_the_grid() -> None:
    found = DecodeInterpolator(DECODE)
    assert found.interpolate_itl(25, 2000) == pytest.approx(15, abs=0.2)
    assert found.interpolate_itl(1000, 2000) == pytest.approx(24, abs=0.2)


def test_best_decode_throughput_is_the_highest_load_within_the_objective() -> None:
    found = DecodeInterpolator(DECODE)
    best = found.find_best_throughput_per_gpu(15.0, 2000)
    assert best.itl_ms <= 15.0
    assert best.kv_usage == pytest.approx(0.5, abs=0.011)
    assert found.find_best_throughput_per_gpu(0.1, 2000).kv_usage == 0.0
    assert found.capacity_rps(15.0, 1900, 200, 2) == pytest.approx(best.thpt_per_gpu * 2 / 200)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: PrefillInterpolator(PrefillProfile(isl=[1, 1], ttft_ms=[1, 1], thpt_per_gpu=[1, 1])),
            "prefill_isl: 1",
        ),
        (
            lambda: DecodeInterpolator(
                DecodeProfile(
                    kv_usage=[0.1, 0.2], context_length=[1, 2], itl_ms=[1, 2], thpt_per_gpu=[1, 2], max_kv_tokens=10
                )
            ),
            "not on one line",
        ),
    ],
)
def test_profile_with_too_few_points_is_one_line(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


def test_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "scipy":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"requires the package scipy; install dynamo-serve\[planner\]"):
        PrefillInterpolator(PREFILL)
