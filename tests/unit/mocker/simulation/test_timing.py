"""Timing follows upstream's polynomials."""

import pytest

from dynamo.mocker.simulation.timing import Timing


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
