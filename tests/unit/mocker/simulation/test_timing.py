"""Timing follows upstream's polynomials."""

import pytest

from dynamo.mocker.simulation.timing import ProfiledTiming, Timing


def test_prefill_time_equals_the_polynomial() -> None:
    assert Timing().prefill_ms(512) == pytest.approx(4.209989e-07 * 512**2 + 1.518344e-02 * 512 + 16.50142)


def test_prefill_of_zero_tokens_takes_no_time() -> None:
    assert Timing().prefill_ms(0) == 0


def test_decode_of_zero_tokens_takes_no_time() -> None:
    assert Timing().decode_ms(0, 1000) == 0


def test_decode_time_depends_on_cache_usage_up_to_capacity() -> None:
    timing = Timing()
    assert timing.decode_ms(1, 1_000_000) == pytest.approx(5.74, abs=1e-3)
    assert timing.decode_ms(500, 1000) == pytest.approx(-25.74 / 4 + 54.01 / 2 + 5.74)
    assert timing.decode_ms(5000, 1000) == timing.decode_ms(1000, 1000)


def test_speedup_ratios_divide_the_step_times() -> None:
    assert Timing(2.0).prefill_ms(100) == pytest.approx(Timing().prefill_ms(100) / 2)
    assert Timing(2.0, 5.0).decode_ms(10, 1000) == pytest.approx(Timing().decode_ms(10, 1000) / 10)
    assert Timing(2.0, 5.0).prefill_ms(100) == Timing(2.0).prefill_ms(100)


def test_speedup_ratio_zero_disables_delays() -> None:
    assert Timing(0.0).prefill_ms(100) == Timing(0.0).decode_ms(10, 100) == 0
    assert Timing(1.0, 0.0).decode_ms(10, 100) == 0


PROFILE = ProfiledTiming([100, 1000, 4000], [10, 50, 300], [1000, 10_000], [500, 5000], [[5, 7], [9, 15]])


@pytest.mark.parametrize(("tokens", "expected_ms"), [(50, 7.778), (100, 10), (550, 30), (2500, 175), (6000, 466.667)])
def test_profile_interpolates_prefill_between_points_and_beyond_them(tokens: int, expected_ms: float) -> None:
    assert PROFILE.prefill_ms(tokens) == pytest.approx(expected_ms, abs=1e-3)


@pytest.mark.parametrize(("tokens", "expected_ms"), [(51, 4.421), (1001, 5.223), (4001, 8.927), (6001, 12.385)])
def test_profile_interpolates_steps_between_cache_use_and_context(tokens: int, expected_ms: float) -> None:
    assert PROFILE.decode_ms(tokens, 1 << 20, 1) == pytest.approx(expected_ms, abs=2e-3)


def test_extrapolated_times_have_lower_bounds() -> None:
    steep = ProfiledTiming([1000, 2000], [50, 300], [1000, 10_000], [500, 5000], [[0.5, 7], [9, 15]])
    assert steep.prefill_ms(100) == 0
    assert steep.decode_ms(101, 1 << 20, 1) == 1


def test_profile_with_one_point_is_constant() -> None:
    fixed = ProfiledTiming([1], [20], [1], [1], [[0.25]])
    assert (fixed.prefill_ms(5000), fixed.decode_ms(5000, 1 << 20, 3)) == (20, 0.25)
