"""Tokens are independent of the rest of the batch, of prompt chunking and of preemptions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.cpu.conftest import CONFIG, random_tensors

from dynamo.core.errors import InvalidArgument
from dynamo.cpu import core as core_module
from dynamo.cpu.core import Core
from dynamo.cpu.generation import ActiveGeneration, PromptLogprobs
from dynamo.cpu.guided import Grammars, key_of
from dynamo.protocols.engine import EngineOutput, GuidedDecoding
from dynamo.protocols.kv_events import Stored
from dynamo.protocols.load import QueuedRequests, ScheduledRequests

Make = Callable[..., Any]
PROMPTS = [[int(token) for token in np.random.default_rng(at).integers(0, 96, 5 + 7 * at)] for at in range(6)]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 77}


@pytest.fixture
def alone(make_core: Make, make_generation: Make, run: Make) -> Callable[..., list[int]]:
    def tokens(prompt: list[int], **options: Any) -> list[int]:
        core, generation = make_core(batched_tokens_max=64, is_caching=False), make_generation(prompt, **options)
        core.add(generation)
        run(core)
        result: list[int] = generation.reply.tokens
        return result

    return tokens


def together(core: Core, generations: list[ActiveGeneration], run: Make) -> list[list[int]]:
    for generation in generations:
        core.add(generation)
    run(core)
    replies: list[Any] = [generation.reply for generation in generations]
    assert all(reply.is_finished for reply in replies)
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.3, "presence_penalty": 0.5}])
def test_core_batching_changes_no_token(
    make_core: Make, make_generation: Make, run: Make, alone: Make, options: dict[str, Any]
) -> None:
    want = [alone(prompt, **options) for prompt in PROMPTS]
    got = together(make_core(), [make_generation(prompt, **options) for prompt in PROMPTS], run)
    assert got == want
    assert all(len(tokens) == 12 for tokens in want)


def test_core_preemption_changes_no_token(make_core: Make, make_generation: Make, run: Make, alone: Make) -> None:
    for options in ({}, SAMPLED):
        core = make_core(blocks=14)
        generations = [make_generation(prompt, max_tokens=14, **options) for prompt in PROMPTS]
        assert together(core, generations, run) == [alone(prompt, max_tokens=14, **options) for prompt in PROMPTS]
        assert core.scheduler.preemptions > 0


def test_core_prefix_cache_changes_no_token(make_core: Make, make_generation: Make, run: Make, alone: Make) -> None:
    core, prompt = make_core(), PROMPTS[5]
    first = together(core, [make_generation(prompt)], run)
    again = make_generation(prompt)
    assert together(core, [again], run) == first == [alone(prompt)]
    usage = again.reply.messages[-1].completion_usage
    assert usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 4 * 4
    longer = prompt + first[0]
    assert together(core, [make_generation(longer)], run) == [alone(longer)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.integers(14, 60),
    sequences_max=st.integers(1, 6),
    batched_tokens_max=st.integers(6, 40),
    is_caching=st.booleans(),
    arrivals=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_core_scheduling_changes_no_token(
    make_core: Make, make_generation: Make, run: Make, deliver: Make, alone: Make, arrivals: list[int], **limits: Any
) -> None:
    core = make_core(**limits)
    generations = [make_generation(prompt, **SAMPLED) for prompt in PROMPTS]
    for generation, pause in zip(generations, arrivals, strict=True):
        core.add(generation)
        for _ in range(pause):
            deliver(core.step())
    run(core)
    replies: list[Any] = [generation.reply for generation in generations]
    assert [reply.tokens for reply in replies] == [alone(prompt, **SAMPLED) for prompt in PROMPTS]


def test_core_choices_of_a_request_share_its_prompt(make_core: Make, make_generation: Make, run: Make) -> None:
    core, generation = make_core(), make_generation(PROMPTS[3], choices=3, max_tokens=6, **SAMPLED)
    core.add(generation)
    run(core)
    reply = generation.reply
    by_index: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for word in reply.messages:
        index, tokens = (0, [word]) if isinstance(word, int) else (word.index, word.token_ids)
        by_index[index] += tokens
    assert all(len(tokens) == 6 for tokens in by_index.values())
    assert len({tuple(tokens) for tokens in by_index.values()}) == 3
    assert reply.is_finished
    ends = [word for word in reply.messages if not isinstance(word, int) and word.finish_reason]
    assert [end.completion_usage is not None for end in ends] == [False, False, True]
    assert ends[-1].completion_usage.completion_tokens == 18


def test_core_final_output_has_finish_reason_and_usage(make_core: Make, make_generation: Make, run: Make) -> None:
    core, generation = make_core(), make_generation(PROMPTS[1], max_tokens=3)
    core.add(generation)
    run(core)
    *plain, last = generation.reply.messages
    assert all(isinstance(word, int) for word in plain)
    assert (last.finish_reason, last.index, len(last.token_ids)) == ("length", 0, 1)
    assert (last.completion_usage.prompt_tokens, last.completion_usage.completion_tokens) == (len(PROMPTS[1]), 3)


def test_core_eos_ends_output_and_min_tokens_delays_it(
    make_core: Make, make_generation: Make, run: Make, alone: Make
) -> None:
    output_text = alone(PROMPTS[2])
    end = output_text[2]
    first = output_text.index(end)
    ended = make_generation(PROMPTS[2], rules={"end_ids": frozenset({end})})
    delayed = make_generation(PROMPTS[2], rules={"end_ids": frozenset({end}), "min_tokens": 8})
    together(make_core(), [ended, delayed], run)
    assert ended.reply.tokens == output_text[: first + 1]
    assert ended.reply.messages[-1].finish_reason == "eos"
    assert len(delayed.reply.tokens) >= 8
    assert end not in delayed.reply.tokens[:7]


def test_core_sends_nothing_for_a_dropped_request(
    make_core: Make, make_generation: Make, run: Make, deliver: Make, alone: Make
) -> None:
    core = make_core()
    dropped, kept = make_generation(PROMPTS[1]), make_generation(PROMPTS[2])
    core.add(dropped)
    core.add(kept)
    deliver(core.step())
    before = len(dropped.reply.tokens)
    core.drop(dropped)
    core.drop(dropped)
    run(core)
    assert len(dropped.reply.tokens) == before
    assert kept.reply.tokens == alone(PROMPTS[2])
    assert core.load().kv_used_blocks == 0


def test_core_failing_request_does_not_affect_others(
    make_core: Make, make_generation: Make, run: Make, alone: Make
) -> None:
    core = make_core()
    broken, kept = make_generation(PROMPTS[1], logit_bias=((9999, 1.0),)), make_generation(PROMPTS[2])
    together_run = [broken, kept]
    for generation in together_run:
        core.add(generation)
    run(core)
    assert isinstance(broken.reply.error, IndexError)
    assert kept.reply.tokens == alone(PROMPTS[2])


def test_core_emits_every_complete_block_once(make_core: Make, make_generation: Make) -> None:
    core, generation = make_core(batched_tokens_max=8), make_generation(PROMPTS[3], max_tokens=9)
    core.add(generation)
    reported = []
    while core.has_work:
        events = core.step().events
        assert all(isinstance(event, Stored) for event in events)
        reported += [block.block_hash for event in events if isinstance(event, Stored) for block in event.blocks]
    assert len(reported) == len(set(reported)) == (len(PROMPTS[3]) + 9 - 1) // 4


def test_core_load_counts_running_and_waiting_requests(make_core: Make, make_generation: Make) -> None:
    core = make_core(sequences_max=1)
    core.add(make_generation([1, 2, 3, 4, 5]))
    core.add(make_generation(PROMPTS[3]))
    load = core.step().load
    assert (load.running_requests, load.waiting_requests) == (1, 1)
    assert (load.kv_used_blocks, load.active_decode_blocks, load.kv_total_blocks) == (2, 2, 128)
    assert load.active_prefill_tokens == len(PROMPTS[3])


def test_core_empty_step_does_nothing(make_core: Make) -> None:
    assert make_core().step().outputs == []


def test_core_step_metrics_count_computed_and_waiting_requests(make_core: Make, make_generation: Make) -> None:
    core = make_core(sequences_max=2, batched_tokens_max=8)
    for prompt in ([1, 2, 3, 4, 5], PROMPTS[1], PROMPTS[0]):
        core.add(make_generation(prompt))
    first, second, third = (core.step().passed for _ in range(3))
    assert first.scheduled_requests == ScheduledRequests(2, 8, 3.5**2, 0, 0, 0, 0.0)
    assert first.queued_requests == QueuedRequests(1, len(PROMPTS[0]), 0.0, 0, 0, 0.0)
    assert second.scheduled_requests == ScheduledRequests(1, 7, 0.0, 3, 1, 6, 0.0)
    assert third.scheduled_requests == ScheduledRequests(1, 2, 0.0, 10, 1, 7, 0.0)


def test_core_step_without_computation_has_no_metrics(make_core: Make) -> None:
    assert make_core().step().passed is None


# ---- guided ----------------------------------------------------------------------------------------------------------

END = 95
ENDS = {"end_ids": frozenset({END})}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture
def guided(make_generation: Make, letters_model: Path, letters: str) -> Callable[..., Any]:
    """Return a request with a constraint, and a parser of the text of its choices."""
    grammars = Grammars(str(letters_model), 96)

    def make(constraint: dict[str, Any], **options: Any) -> tuple[ActiveGeneration, Callable[[int], str]]:
        generation: ActiveGeneration = make_generation(PROMPTS[1], **({"max_tokens": 100, "rules": ENDS} | options))
        wanted = GuidedDecoding(**constraint)
        guide = grammars.compile(wanted, key_of(wanted, None))
        for choice in generation.choices:
            choice.guide = guide.fresh()

        def text(index: int = 0) -> str:
            sequence = generation.choices[index].sequence
            output_text = sequence.tokens[sequence.prompt_tokens :]
            return "".join(letters[token] for token in output_text if token != END)

        return generation, text

    return make


def reasons(generation: ActiveGeneration) -> dict[int, str]:
    reply: Any = generation.reply
    return {
        word.index: word.finish_reason for word in reply.messages if not isinstance(word, int) and word.finish_reason
    }


@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.3}, {"logit_bias": ((33, 50.0),)}])
def test_core_guided_random_model_writes_valid_json(
    make_core: Make, guided: Make, run: Make, options: dict[str, Any]
) -> None:
    generation, text = guided({"json": CITY}, **options)
    core = make_core()
    core.add(generation)
    run(core)
    jsonschema.validate(json.loads(text()), CITY)
    assert reasons(generation) == {0: "stop"}


def test_core_guides_every_choice_separately(make_core: Make, guided: Make, run: Make) -> None:
    generation, text = guided({"json": CITY}, choices=4, **SAMPLED)
    core = make_core()
    core.add(generation)
    run(core)
    texts = [text(index) for index in range(4)]
    for one in texts:
        jsonschema.validate(json.loads(one), CITY)
    assert len(set(texts)) > 1
    assert reasons(generation) == dict.fromkeys(range(4), "stop")


def test_core_seeded_guided_output_does_not_depend_on_other_requests(make_core: Make, guided: Make, run: Make) -> None:
    def output_text(others: int) -> str:
        generation, text = guided({"json": CITY}, **SAMPLED)
        core = make_core(blocks=64)
        core.add(generation)
        for _ in range(others):
            core.add(guided({"regex": "[a-z ]{40}"})[0])
        run(core)
        result: str = text()
        return result

    assert output_text(0) == output_text(4)


def test_core_unguided_output_does_not_depend_on_guided_requests(
    make_core: Make, make_generation: Make, guided: Make, run: Make, alone: Make
) -> None:
    core, free = make_core(), make_generation(PROMPTS[2])
    core.add(free)
    core.add(guided({"json": CITY})[0])
    run(core)
    assert free.reply.tokens == alone(PROMPTS[2])


def test_core_preemption_keeps_the_grammar_state(make_core: Make, guided: Make, run: Make) -> None:
    core = make_core(blocks=14)
    several = [guided({"json": CITY}, **SAMPLED) for _ in range(4)]
    for generation, _ in several:
        core.add(generation)
    run(core)
    assert core.scheduler.preemptions > 0
    for _, text in several:
        jsonschema.validate(json.loads(text()), CITY)


def test_core_guided_text_reports_length_only_when_truncated(make_core: Make, guided: Make, run: Make) -> None:
    core = make_core()
    (cut, _), (fits, text) = guided({"regex": "abcdef"}, max_tokens=3), guided({"regex": "abc"}, max_tokens=3)
    core.add(cut)
    core.add(fits)
    run(core)
    assert reasons(cut) == {0: "length"}
    assert reasons(fits) == {0: "stop"}
    assert text() == "abc"


def test_core_guided_text_that_may_continue_ends_with_eos(make_core: Make, guided: Make, run: Make) -> None:
    generation, text = guided({"regex": "a+"}, logit_bias=((END, 100.0),))
    core = make_core()
    core.add(generation)
    run(core)
    assert text() == "a"
    assert generation.reply.tokens[-1] == END
    assert reasons(generation) == {0: "eos"}


def test_core_complete_guided_text_ends_before_min_tokens(make_core: Make, guided: Make, run: Make) -> None:
    core = make_core()
    rules = ENDS | {"min_tokens": 9}
    exact, text = guided({"regex": "abc"}, rules=rules)
    longer, more = guided({"regex": "(abc)+"}, rules=rules, logit_bias=((END, 100.0),))
    core.add(exact)
    core.add(longer)
    run(core)
    assert (text(), reasons(exact)) == ("abc", {0: "stop"})
    assert (more(), reasons(longer)) == ("abcabcabc", {0: "eos"})


def test_core_guided_text_without_content_ends_at_once(make_core: Make, guided: Make, run: Make) -> None:
    generation, text = guided({"regex": ""}, rules={})
    core = make_core()
    core.add(generation)
    run(core)
    assert text() == ""
    assert reasons(generation) == {0: "stop"}
    assert generation.reply.is_finished


def test_core_guided_logprobs_are_those_of_the_model(make_core: Make, guided: Make, run: Make) -> None:
    generation, _ = guided({"regex": "abc"}, logprobs=2)
    core = make_core()
    core.add(generation)
    run(core)
    likelihoods = [word.log_probs[0] for word in generation.reply.messages]
    assert len(likelihoods) == 3
    assert all(one < -0.01 for one in likelihoods)


def test_core_grammar_failure_ends_its_request_only(make_core: Make, guided: Make, run: Make) -> None:
    core = make_core()
    (broken, _), (sound, text) = guided({"regex": "abc"}), guided({"regex": "abc"})
    core.add(broken)
    core.add(sound)
    broken.choices[0].guide.allowed = lambda *_: np.ones(96, np.bool_)
    run(core)
    assert isinstance(broken.reply.error, InvalidArgument)
    assert text() == "abc"


@pytest.fixture
def only() -> Callable[..., Any]:
    """The mask of a few tokens."""

    def mask(*tokens: int) -> Any:
        allowed = np.zeros(96, np.bool_)
        allowed[list(tokens)] = True
        return allowed

    return mask


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_core_samples_only_allowed_tokens(
    make_core: Make, make_generation: Make, run: Make, only: Make, temperature: float
) -> None:
    core, generation = make_core(), make_generation(PROMPTS[1], allowed=only(3, 8), temperature=temperature)
    core.add(generation)
    run(core)
    assert len(generation.reply.tokens) == 12
    assert set(generation.reply.tokens) <= {3, 8}


def test_core_combines_allowed_tokens_with_a_grammar(
    make_core: Make, guided: Make, run: Make, only: Make, letters: str
) -> None:
    generation, text = guided({"regex": "[ab]{4}"}, allowed=only(letters.index("b"), letters.index("c")))
    core = make_core()
    core.add(generation)
    run(core)
    assert text() == "bbbb"


def test_core_ends_when_only_eos_is_allowed(make_core: Make, make_generation: Make, run: Make, only: Make) -> None:
    rules = ENDS | {"min_tokens": 5}
    core, generation = make_core(), make_generation(PROMPTS[1], allowed=only(END), rules=rules)
    core.add(generation)
    run(core)
    assert set(generation.reply.tokens) == {END}


# ---- log-probabilities of the prompt ---------------------------------------------------------------------------------


def scoring(generation: ActiveGeneration, count: int = 2) -> ActiveGeneration:
    """Return the request with log-probabilities of its prompt."""
    generation.choices[0].prompt_logprobs = PromptLogprobs(count)
    generation.choices[0].sequence.scored = 1
    return generation


def prompt_logprobs_of(generation: Any) -> list[Any]:
    """The prompt information of its first output."""
    first, *others = generation.reply.messages
    assert not any(isinstance(word, EngineOutput) and word.engine_data for word in others)
    found: list[Any] = first.engine_data["prompt_logprobs"]
    return found


@pytest.fixture
def naive_prompt_logprobs(tiny_model: Any, naive_logits: Callable[..., Any]) -> Callable[[list[int]], Any]:
    def logprobs(prompt: list[int]) -> Any:
        logits = naive_logits(prompt, CONFIG, random_tensors(CONFIG))
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    return logprobs


@pytest.mark.parametrize("batched_tokens_max", [8, 64])
def test_core_prompt_logprobs_are_independent_of_chunk_boundaries(
    make_core: Make, make_generation: Make, run: Make, naive_prompt_logprobs: Make, alone: Make, batched_tokens_max: int
) -> None:
    prompt = PROMPTS[4]
    generation = scoring(make_generation(prompt))
    other = make_generation(PROMPTS[2])
    together(make_core(batched_tokens_max=batched_tokens_max), [other, generation], run)
    found, want = prompt_logprobs_of(generation), naive_prompt_logprobs(prompt)
    assert len(found) == len(prompt)
    assert found[0] is None
    for at, token in enumerate(prompt[1:], start=1):
        row = want[at - 1]
        own = found[at][str(token)]
        assert own["logprob"] == pytest.approx(row[token], abs=1e-3)
        assert own["rank"] == 1 + int((row > row[token]).sum())
        assert {int(one) for one in found[at]} == {token, *np.argsort(-row)[:2].tolist()}
        assert next(iter(found[at])) == str(token)
    replies: list[Any] = [generation.reply, other.reply]
    assert [reply.tokens for reply in replies] == [alone(prompt), alone(PROMPTS[2])]


def test_prefix_cache_does_not_lose_prompt_logprobs(make_core: Make, make_generation: Make, run: Make) -> None:
    core, prompt = make_core(), PROMPTS[5]
    first = scoring(make_generation(prompt))
    together(core, [first], run)
    together(core, [make_generation(prompt)], run)
    again = scoring(make_generation(prompt))
    together(core, [again], run)
    assert prompt_logprobs_of(again) == prompt_logprobs_of(first)
    replies: list[Any] = [again.reply]
    assert replies[0].messages[-1].completion_usage.prompt_tokens_details.cached_tokens == 0
    plain = make_generation(prompt)
    together(core, [plain], run)
    output_text: Any = plain.reply
    assert output_text.messages[-1].completion_usage.prompt_tokens_details.cached_tokens > 0, (
        "its blocks serve other requests"
    )


def test_preemption_does_not_lose_prompt_logprobs(make_core: Make, make_generation: Make, run: Make) -> None:
    want = []
    for prompt in PROMPTS:
        generation = scoring(make_generation(prompt, max_tokens=14))
        together(make_core(), [generation], run)
        want.append(prompt_logprobs_of(generation))
    core = make_core(blocks=14)
    generations = [scoring(make_generation(prompt, max_tokens=14)) for prompt in PROMPTS]
    together(core, generations, run)
    assert core.scheduler.preemptions > 0
    for generation, expected in zip(generations, want, strict=True):
        found = prompt_logprobs_of(generation)
        assert [None if one is None else list(one) for one in found] == [
            None if one is None else list(one) for one in expected
        ]


def test_core_scores_a_prompt_of_several_choices_once(make_core: Make, make_generation: Make, run: Make) -> None:
    generation = scoring(make_generation(PROMPTS[3], choices=3))
    together(make_core(), [generation], run)
    reply: Any = generation.reply
    assert [word.index for word in reply.messages if isinstance(word, EngineOutput) and word.engine_data] == [0]


def test_core_scores_at_most_the_maximum_number_of_logits_at_once(
    make_core: Make, make_generation: Make, run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scoring(make_generation(PROMPTS[5]))
    together(make_core(batched_tokens_max=64), [whole], run)
    monkeypatch.setattr(core_module, "SCORED_LOGITS_MAX", 96 * 3)
    core = make_core(batched_tokens_max=64)
    rows: list[int] = []
    logits = core.model.logits
    monkeypatch.setattr(core.model, "logits", lambda states: rows.append(len(states)) or logits(states))
    cut = scoring(make_generation(PROMPTS[5]))
    together(core, [cut], run)
    assert max(rows) == 3
    for one, other in zip(prompt_logprobs_of(cut)[1:], prompt_logprobs_of(whole)[1:], strict=True):
        assert {token: round(found["logprob"], 4) for token, found in one.items()} == {
            token: round(found["logprob"], 4) for token, found in other.items()
        }


def test_core_prompt_of_one_token_has_a_null_logprob(make_core: Make, make_generation: Make, run: Make) -> None:
    generation = scoring(make_generation([7]))
    together(make_core(), [generation], run)
    assert prompt_logprobs_of(generation) == [None]
