"""Prompts in flight: the oldest of each slot decays, the others wait."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_router.prefill_decay import PrefillDecay


def load(decay: PrefillDecay, now: float, *tokens: float) -> list[float]:
    found = list(tokens)
    decay.subtract(found, now)
    return found


def test_prefill_decay_reduces_the_oldest_prompt_linearly() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 10.0, now=5.0)

    assert [load(decay, now, 1000)[0] for now in (5.0, 7.5, 10.0, 15.0, 99.0)] == [1000, 750, 500, 0, 0]


def test_prefill_decay_counts_later_prompts_in_full() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 10.0, now=0.0)
    decay.add(0, "b", 600, 6.0, now=1.0)
    assert load(decay, 5.0, 1600) == [1100]

    decay.remove(0, "a", now=8.0)

    assert load(decay, 8.0, 600) == [600]
    assert load(decay, 11.0, 600) == [300]


def test_prefill_decay_uses_the_expected_end_until_it_is_reported() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 10.0, now=0.0)
    decay.add(0, "b", 600, 6.0, now=1.0)

    decay.remove(0, "a", now=12.0)

    assert load(decay, 13.0, 600) == [300]


def test_prefill_decay_starts_no_prompt_before_its_arrival() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 1.0, now=0.0)
    decay.add(0, "b", 600, 6.0, now=9.0)

    decay.remove(0, "a")

    assert load(decay, 12.0, 600) == [300]


def test_prefill_decay_does_not_reset_the_first_prompt_when_another_is_removed() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 10.0, now=0.0)
    decay.add(0, "b", 600, 6.0, now=0.0)

    decay.remove(0, "b", now=2.0)

    assert load(decay, 5.0, 1000) == [500]


def test_prefill_decay_keeps_slots_separate() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 10.0, now=0.0)
    decay.add(2, "b", 100, 1.0, now=0.0)

    assert load(decay, 0.5, 1000, 7, 100) == [950, 7, 50]


def test_prefill_decay_counts_no_tokens_for_a_prompt_without_duration() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 1000, 0.0, now=0.0)

    assert load(decay, 0.0, 1000) == [0]


def test_prefill_decay_ignores_removal_of_an_unknown_prompt() -> None:
    decay = PrefillDecay()
    decay.add(0, "a", 10, 1.0, now=0.0)
    decay.remove(0, "b")
    decay.remove(1, "a")

    assert len(decay) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 1000), st.floats(0, 5), st.floats(0, 3), st.booleans()), max_size=30
    )
)
def test_prefill_decay_is_between_zero_and_the_total(
    steps: list[tuple[int, int, float, float, bool]],
) -> None:
    decay, now = PrefillDecay(), 0.0
    under_way: list[tuple[int, str, int]] = []
    for number, (slot, tokens, seconds, passed, removes) in enumerate(steps):
        now += passed
        if removes and under_way:
            gone = under_way.pop(tokens % len(under_way))
            decay.remove(gone[0], gone[1], now)
        else:
            decay.add(slot, str(number), tokens, seconds, now)
            under_way.append((slot, str(number), tokens))
        full = [float(sum(one[2] for one in under_way if one[0] == at)) for at in range(3)]
        assert len(decay) == len(under_way)
        for at, left in enumerate(load(decay, now, *full)):
            first = next((one[2] for one in under_way if one[0] == at), 0)
            assert full[at] - first - 1e-6 <= left <= full[at]
