"""Ticks of the metronome, and its output file."""

import pytest
from benchmarks.metronome import BEAT, Beat, next_beat, read_beats
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("now", "phase", "due"), [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.0, 0, 2.0), (1.0, 1, 1.5)])
def test_phases_have_one_common_grid(now, phase, due):
    assert next_beat(now, 1.0, phase, 2) == pytest.approx(due)


@given(st.floats(0, 1e6), st.sampled_from([0.005, 0.02, 0.05]), st.integers(0, 7))
def test_next_beat_is_at_most_one_interval_later(now, interval_s, phase):
    due = next_beat(now, interval_s, phase, 8)
    assert now - 1e-6 <= due <= now + interval_s + 1e-6


def test_beats_round_trip_without_an_incomplete_one(tmp_path):
    path = tmp_path / "beats"
    path.write_bytes(BEAT.pack(1.0, 1.5, 0, 7) + BEAT.pack(2.0, 2.5, 1, 8) + b"half")
    assert list(read_beats(str(path))) == [Beat(1.0, 1.5, 0, 7), Beat(2.0, 2.5, 1, 8)]
