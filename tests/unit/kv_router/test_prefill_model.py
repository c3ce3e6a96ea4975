"""Prefill time model: an initial estimate, then a fit of observed steps."""

import random

import pytest

from dynamo.kv_router.prefill_model import PrefillModel


def test_prefill_model_takes_no_time_for_a_cached_prompt() -> None:
    assert PrefillModel().seconds(0, 4096) == 0.0


def test_prefill_model_takes_longer_for_longer_prompts_and_contexts() -> None:
    model = PrefillModel(pair_s=1e-9)

    assert 0 < model.seconds(100) < model.seconds(1000) < model.seconds(1000, 8000)


def test_prefill_model_learns_from_steps() -> None:
    truth, model, rng = PrefillModel(12e-3, 8e-5, 3e-9), PrefillModel(), random.Random(1)
    for _ in range(640):
        new, cached = rng.randrange(16, 8192), rng.randrange(0, 8192)
        model.observe(1, new, cached, truth.seconds(new, cached))

    assert model.steps == 640
    for new, cached in ((200, 0), (4000, 0), (4000, 4000)):
        assert model.seconds(new, cached) == pytest.approx(truth.seconds(new, cached), rel=0.05)


def test_prefill_model_keeps_parameters_that_identical_steps_do_not_determine() -> None:
    model = PrefillModel()
    for _ in range(320):
        model.observe(1, 1000, 0, 0.1)

    assert model.seconds(1000) == pytest.approx(0.1, rel=0.05)
    assert min(model.base_s, model.token_s, model.pair_s) >= 0.0


@pytest.mark.parametrize(("prompts", "tokens", "seconds"), [(0, 10, 1.0), (1, 0, 1.0), (1, 10, 0.0), (1, 10, -1.0)])
def test_prefill_model_ignores_steps_without_prompts_or_duration(prompts: int, tokens: int, seconds: float) -> None:
    model = PrefillModel()

    model.observe(prompts, tokens, 0, seconds)

    assert model == PrefillModel()
