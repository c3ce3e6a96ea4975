from collections.abc import Callable

import pytest

from dynamo.cpu.generation import ActiveGeneration, StopRules
from dynamo.cpu.sampler import Sampled

RULES = StopRules(max_tokens=5, min_tokens=3, end_ids=frozenset({9}), stop_ids=frozenset({8}))


@pytest.mark.parametrize(
    ("token", "message", "reason"),
    [(1, 4, None), (9, 3, "eos"), (8, 3, "stop"), (9, 2, None), (8, 2, None), (1, 5, "length"), (9, 5, "eos")],
)
def test_generation_ends_by_its_stop_rules(token: int, message: int, reason: str | None) -> None:
    assert RULES.reason(token, message) == reason


@pytest.mark.parametrize(("message", "forbidden"), [(0, [8, 9]), (1, [8, 9]), (2, [])])
def test_generation_forbids_end_tokens_before_min_tokens(message: int, forbidden: list[int]) -> None:
    assert list(RULES.forbidden(message)) == forbidden


def test_generation_plain_token_creates_no_output_object(make_generation: Callable[..., ActiveGeneration]) -> None:
    (choice,) = make_generation([1, 2]).choices
    assert choice.emit(Sampled(5)) is None
    assert choice.generated == 1


def test_generation_token_of_another_choice_carries_its_index(make_generation: Callable[..., ActiveGeneration]) -> None:
    output = make_generation([1, 2], choices=2).choices[1].emit(Sampled(5))
    assert output is not None
    assert (output.index, output.token_ids, output.finish_reason) == (1, [5], None)


def test_generation_sends_logprobs_with_their_token(make_generation: Callable[..., ActiveGeneration]) -> None:
    (choice,) = make_generation([1, 2], logprobs=2).choices
    choice.emit(Sampled(5, -0.5, [(5, -0.5), (6, -1.5)]))
    output = choice.emit(Sampled(7, -2.0, []))
    assert output is not None
    assert (output.log_probs, output.cum_log_probs, output.top_logprobs) == ([-2.0], -2.5, [[]])


def test_generation_ranks_alternatives_from_one(make_generation: Callable[..., ActiveGeneration]) -> None:
    (choice,) = make_generation([1, 2], logprobs=2).choices
    output = choice.emit(Sampled(6, -1.5, [(5, -0.5), (6, -1.5)]))
    assert output is not None
    assert output.top_logprobs is not None
    assert [(top.rank, top.token_id, top.logprob) for top in output.top_logprobs[0]] == [(1, 5, -0.5), (2, 6, -1.5)]


def test_generation_reports_a_matched_stop_token(make_generation: Callable[..., ActiveGeneration]) -> None:
    (choice,) = make_generation([1], rules={"stop_ids": frozenset({4})}).choices
    output = choice.emit(Sampled(4))
    assert output is not None
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", 4, [4])


def test_generation_usage_counts_all_choices(make_generation: Callable[..., ActiveGeneration]) -> None:
    generation = make_generation([1, 2, 3], choices=2)
    generation.choices[0].sequence.cached_tokens = 2
    for choice in generation.choices:
        choice.emit(Sampled(5))
    usage = generation.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
