from hypothesis import given
from hypothesis import strategies as st

from dynamo.kvbm.logical.frequency import COUNT_MAX, RepeatFilter, Sketch


@given(st.lists(st.integers(0, 2**64 - 1), max_size=200))
def test_frequency_sketch_never_underestimates(keys: list[int]) -> None:
    sketch = Sketch(256)
    for key in keys:
        sketch.observe(key)
    for key in set(keys):
        assert sketch.estimate(key) >= min(keys.count(key), COUNT_MAX)


def test_frequency_sketch_decays() -> None:
    sketch = Sketch(1)
    for _ in range(COUNT_MAX):
        sketch.observe(1)
    for key in range(2, 2000):
        sketch.observe(key)
    assert sketch.estimate(1) < COUNT_MAX


def test_frequency_filter_accepts_a_repeated_block() -> None:
    repeats = RepeatFilter()
    assert [repeats.passes(1, 0.0) for _ in range(3)] == [False, True, True]


def test_frequency_filter_rejects_rare_blocks() -> None:
    repeats = RepeatFilter(decay_s=10.0)
    assert [repeats.passes(1, at * 10.0) for at in range(4)] == [False] * 4


def test_frequency_filter_is_bounded() -> None:
    repeats = RepeatFilter(entries_max=8)
    for key in range(100):
        repeats.passes(key, 0.0)
    assert len(repeats) <= 8
