from typing import Any

import numpy as np
import pytest

from dynamo.cpu.sampler import Draw, History, Sampling, greedy, log_softmax, sample, uniform

VOCAB = 32
LOGITS = (np.random.default_rng(5).standard_normal(VOCAB) * 2).astype(np.float32)
LIKELIEST = int(LOGITS.argmax())


def draw(position: int = 0, history: History | None = None, forbidden: tuple[int, ...] = (), **options: Any) -> Draw:
    return Draw(Sampling(**options), position, history, forbidden)


def drawn(count: int, logits: Any = LOGITS, **options: Any) -> list[int]:
    return [sample(logits, draw(position, **options)).token for position in range(count)]


def chi_square(tokens: list[int], probabilities: Any) -> float:
    """Of the observed counts against the expected, each bin with enough expectation; per degree of freedom."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    is_large = expected > 5
    terms = (counts[is_large] - expected[is_large]) ** 2 / expected[is_large]
    return float(terms.sum() / max(1, is_large.sum() - 1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampler_frequencies_follow_the_temperature(temperature: float) -> None:
    probabilities = np.exp(log_softmax(LOGITS / np.float32(temperature)))
    assert chi_square(drawn(4000, seed=11, temperature=temperature), probabilities) < 1.6


def test_sampler_top_p_keeps_the_smallest_sufficient_set() -> None:
    probabilities = np.exp(log_softmax(LOGITS))
    ordered = np.argsort(-probabilities)
    kept = ordered[: int(np.searchsorted(probabilities[ordered].cumsum(), 0.8)) + 1]
    cut = np.zeros(VOCAB)
    cut[kept] = probabilities[kept] / probabilities[kept].sum()
    tokens = drawn(4000, seed=3, top_p=0.8)
    assert set(tokens) == set(kept.tolist())
    assert chi_square(tokens, cut) < 1.6


def test_sampler_top_k_keeps_k_tokens() -> None:
    assert set(drawn(800, seed=3, top_k=3)) == set(np.argsort(-LOGITS)[:3].tolist())


def test_sampler_min_p_keeps_tokens_near_the_most_likely() -> None:
    probabilities = np.exp(log_softmax(LOGITS))
    kept = np.flatnonzero(probabilities >= 0.25 * probabilities.max()).tolist()
    assert set(drawn(800, seed=3, min_p=0.25)) == set(kept)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}]
)
def test_sampler_greedy_settings_pick_the_most_likely_token(options: dict[str, Any]) -> None:
    assert set(drawn(50, seed=1, **options)) == {LIKELIEST}


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": VOCAB + 5}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_sampler_neutral_settings_change_nothing(options: dict[str, Any]) -> None:
    assert drawn(100, seed=2, **options) == drawn(100, seed=2)


def test_sampler_output_depends_on_the_seed_only() -> None:
    assert drawn(50, seed=4) == drawn(50, seed=4)
    assert drawn(50, seed=4) != drawn(50, seed=5)
    assert drawn(50, seed=4, index=0) != drawn(50, seed=4, index=1)


def test_sampler_is_stable_under_rounding() -> None:
    noise = np.random.default_rng(1).standard_normal((200, VOCAB)).astype(np.float32) * 1e-6
    tokens = [sample(LOGITS + noise[at], draw(at, seed=9, top_p=0.9)).token for at in range(200)]
    assert tokens == drawn(200, seed=9, top_p=0.9)


def test_sampler_random_numbers_are_uniform() -> None:
    values = np.array([uniform(1, 0, position) for position in range(20_000)])
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # The 0.1 % point of chi-square with 19 degrees.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_sampler_logit_bias_adds_and_forbids() -> None:
    assert set(drawn(30, seed=1, logit_bias=((7, 100.0),))) == {7}
    biased = ((LIKELIEST, -100.0),)
    assert sample(LOGITS, draw(temperature=0.0, logit_bias=biased)).token == int(np.argsort(-LOGITS)[1])


def test_sampler_never_picks_forbidden_tokens() -> None:
    assert sample(LOGITS, draw(temperature=0.0, forbidden=(LIKELIEST,))).token == int(np.argsort(-LOGITS)[1])
    assert LIKELIEST not in drawn(300, seed=1, forbidden=(LIKELIEST,))


def test_sampler_does_not_modify_logits() -> None:
    before = LOGITS.copy()
    sample(LOGITS, draw(temperature=0.7, top_p=0.5, logit_bias=((3, 5.0),), forbidden=(1,), logprobs=2))
    assert np.array_equal(LOGITS, before)


def test_sampler_repetition_penalty_applies_to_prompt_and_output() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    history = History.of([0], 4)
    assert sample(logits, draw(temperature=0.0, repetition_penalty=1.2, history=history)).token == 1
    history.add(1)
    assert sample(logits, draw(temperature=0.0, repetition_penalty=1.2, history=history)).token == 0
    negative = np.array([-5.0, -5.0, -1.0, -1.1], np.float32)
    assert sample(negative, draw(temperature=0.0, repetition_penalty=1.2, history=History.of([2], 4))).token == 3


def test_sampler_frequency_and_presence_penalties_apply_to_output_only() -> None:
    logits = np.array([2.0, 1.5, 0.0], np.float32)
    history = History.of([0, 0, 0], 3)
    assert sample(logits, draw(temperature=0.0, frequency_penalty=0.4, history=history)).token == 0
    history.add(0)
    assert sample(logits, draw(temperature=0.0, frequency_penalty=0.4, history=history)).token == 0
    assert sample(logits, draw(temperature=0.0, presence_penalty=0.6, history=history)).token == 1
    history.add(0)
    assert sample(logits, draw(temperature=0.0, frequency_penalty=0.4, history=history)).token == 1


def test_sampler_logprobs_are_those_of_the_model() -> None:
    sampled = sample(LOGITS, draw(seed=1, temperature=0.3, logit_bias=((3, 9.0),), logprobs=4))
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert sampled.logprob == pytest.approx(want[sampled.token], abs=1e-5)
    assert [token for token, _ in sampled.alternatives] == np.argsort(-LOGITS)[:4].tolist()
    assert [logprob for _, logprob in sampled.alternatives] == pytest.approx(sorted(want)[::-1][:4], abs=1e-5)


def test_sampler_accepts_zero_alternatives() -> None:
    sampled = sample(LOGITS, draw(temperature=0.0, logprobs=0))
    assert sampled.logprob is not None
    assert sampled.alternatives == []
    assert len(sample(LOGITS, draw(temperature=0.0, logprobs=99)).alternatives) == VOCAB


def test_sampler_greedy_rows_are_the_most_likely() -> None:
    rows = np.stack([LOGITS, -LOGITS])
    assert greedy(rows) == [int(LOGITS.argmax()), int(LOGITS.argmin())]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_sampler_refuses_non_finite_logits(wrong: float) -> None:
    logits = LOGITS.copy()
    logits[3] = wrong
    with pytest.raises(FloatingPointError):
        sample(logits, draw(seed=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("more", [{}, {"logit_bias": ((3, 100.0),)}])
def test_sampler_picks_only_allowed_tokens(temperature: float, more: dict[str, Any]) -> None:
    logits = np.array([9.0, 8.0, 1.0, 7.0, 2.0], np.float32)
    allowed = np.array([False, False, True, False, True])
    output = {
        sample(logits, Draw(Sampling(temperature=temperature, logprobs=1, **more), position, allowed=allowed)).token
        for position in range(40)
    }
    assert output == ({4} if temperature == 0 else {2, 4})
    assert logits.tolist() == [9.0, 8.0, 1.0, 7.0, 2.0]


def test_history_of_a_resumed_request_counts_the_output_in_its_prompt() -> None:
    whole = History.of([1, 2], 8)
    for token in (3, 3, 1):
        whole.add(token)
    again = History.of([1, 2, 3, 3, 1], 8, output_tokens=3)
    assert again.counts.tolist() == whole.counts.tolist()
    assert again.is_seen.tolist() == whole.is_seen.tolist()
    assert History.of([1, 2], 8).counts.tolist() == [0] * 8
