"""The corpus is the same for a seed, excludes the evaluation, and renders as its template does."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import demo_corpus
from demo_corpus import Conversation, Json, Learn, Message, ToolCall


def conversations(count: int, seed: int = 3) -> Iterator[Conversation]:
    rng = random.Random(seed)
    return (demo_corpus.conversation(rng) for _ in range(count))


@functools.cache
def template() -> jinja2.Template:
    """The chat template, as Hugging Face's renderer compiles it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(demo_corpus.CHAT_TEMPLATE)


def render(conversation: Conversation, *, whole: bool) -> str:
    """Render the conversation: with its answer, or up to it."""
    messages = conversation.messages if whole else conversation.messages[:-1]
    return template().render(
        messages=[message.openai() for message in messages],
        tools=list(conversation.tools) or None,
        add_generation_prompt=not whole,
        enable_thinking=conversation.thinking,
    )


def test_equal_seeds_produce_equal_corpora() -> None:
    first = list(islice(demo_corpus.samples(5), 200))
    assert first == list(islice(demo_corpus.samples(5), 200))
    assert first != list(islice(demo_corpus.samples(6), 200))


def test_corpus_prompt_equals_the_rendered_template() -> None:
    for conversation in conversations(300):
        assert demo_corpus.prompt(conversation) == render(conversation, whole=False)


def test_corpus_response_equals_its_rendered_template() -> None:
    for conversation in conversations(200):
        if conversation.thinking:
            text = "".join(piece for piece, _ in demo_corpus.pieces(conversation))
            assert text + "\n" == render(conversation, whole=True)


def test_chat_template_accepts_developer_parts_and_tool_messages() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, object]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 and "}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThree."},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    assert template().render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 and 2?<|im_end|>\n"
        "<|im_start|>assistant\nThree.<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_only_assistant_text_is_trained() -> None:
    for conversation in conversations(200):
        *before, (answer, learn) = demo_corpus.pieces(conversation)
        assert learn is Learn.ALL
        assert answer.endswith("<|im_end|>")
        for text, how in before:
            assert how is not Learn.ALL
            assert how is Learn.NOTHING or not text.startswith("<|im_start|>")


def test_held_out_sums_are_not_in_the_training_data() -> None:
    expected_answers = [case.expected for case in demo_corpus.held_out_sums(1, 300)]
    pairs = {tuple(map(int, re.findall(r"\d+", answer)[:2])) for answer in expected_answers}
    assert len(pairs) == 300
    both_orders = pairs | {(b, a) for a, b in pairs}
    for sample in islice(demo_corpus.samples(9), 1500):
        text = "".join(piece for piece, _ in sample)
        trained = {(int(a), int(b)) for a, b in re.findall(r"\b(\d\d) ?\+ ?(\d\d)\b(?! \+)", text)}
        assert not trained & both_orders


def test_held_out_phrasings_are_not_in_the_training_data() -> None:
    assert not set(demo_corpus.TERM_FORMS) & set(demo_corpus.TERM_FORMS_HELD_OUT)
    assert not set(demo_corpus.ACTION_FORMS) & set(demo_corpus.ACTION_FORMS_HELD_OUT)
    held_out = {case.conversation.messages[0].content for case in demo_corpus.held_out_facts(1)}
    trained = {_bare(text) for fact in demo_corpus.FACTS for text in _trained_questions(fact)}
    assert len(held_out) > 200
    assert not {_bare(text) for text in held_out} & trained


def _trained_questions(fact: demo_corpus.Fact) -> Iterator[str]:
    yield from fact.asked
    for forms, names in ((demo_corpus.TERM_FORMS, fact.terms), (demo_corpus.ACTION_FORMS, fact.actions)):
        for form in forms:
            for name in names:
                yield form.format(x=name)


def _bare(question: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", question.lower())


def test_each_question_has_one_trained_answer() -> None:
    answers: dict[str, str] = {}
    for fact in demo_corpus.FACTS:
        for question in {*_trained_questions(fact), *fact.held_out}:
            assert answers.setdefault(_bare(question), fact.answer) == fact.answer, question


def test_held_out_tools_are_not_in_the_training_data() -> None:
    held_out = {call.name for case in demo_corpus.held_out_tools(1, 300) for call in case.calls}
    for conversation in conversations(800):
        assert not {demo_corpus.tool_name(tool) for tool in conversation.tools} & held_out


def test_tool_calls_parse_and_fit_their_tools() -> None:
    seen = 0
    for conversation in conversations(800):
        required = {demo_corpus.tool_name(tool): _required(tool) for tool in conversation.tools}
        for message in conversation.messages:
            for call in message.calls:
                seen += 1
                body = json.loads(call.text().removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                assert body == {"name": call.name, "arguments": call.arguments}
                assert required[call.name] <= set(call.arguments)
    assert seen > 200


def _required(tool: dict[str, Json]) -> set[str]:
    function = tool["function"]
    assert isinstance(function, dict)
    schema = function["parameters"]
    assert isinstance(schema, dict)
    required = schema["required"]
    assert isinstance(required, list)
    return {str(name) for name in required}


@pytest.mark.parametrize(("a", "b"), [(10, 10), (55, 66), (99, 99), (12, 8), (3, 4)])
def test_sum_and_difference_reasoning_is_correct(a: int, b: int) -> None:
    assert demo_corpus.sum_thought(a, b).endswith(f"The sum is {a + b}.")
    high, low = max(a, b), min(a, b)
    ones, tens = map(int, re.findall(r"= (\d)(?=[.,])", demo_corpus.difference_thought(high, low)))
    assert 10 * tens + ones == high - low


def test_every_conversation_ends_with_reasoning() -> None:
    for conversation in conversations(800):
        assert conversation.messages[-1].role == "assistant"
        assert conversation.messages[-1].thought.strip()


def test_earlier_reasoning_is_rendered_only_within_the_same_request() -> None:
    messages = (
        Message("user", "one"),
        Message("assistant", "1", "first thought"),
        Message("user", "two"),
        Message("assistant", "", "second thought", (ToolCall("f", {}),)),
        Message("tool", "x"),
        Message("assistant", "2", "third thought"),
    )
    text = demo_corpus.prompt(Conversation("tool", messages, ({"function": {"name": "f"}},)))
    assert "first thought" not in text
    assert "second thought" in text
    assert "third thought" not in text


def test_bundled_model_has_the_corpus_template_and_is_small() -> None:
    bundled = Path(__file__).resolve().parents[3] / "src" / "dynamo" / "cpu" / "demo_model"
    config = json.loads((bundled / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == demo_corpus.CHAT_TEMPLATE
    assert sum(path.stat().st_size for path in bundled.iterdir()) < 8 * 2**20


def test_json_responses_are_valid_and_only_values_are_trained() -> None:
    rng = random.Random(4)
    for _ in range(400):
        fields = demo_corpus.json_fields(rng)[1]
        written = demo_corpus.json_pieces(fields, learns_keys=False)
        text = "".join(piece for piece, _ in written)
        assert text.endswith("<|im_end|>")
        assert json.loads(text.removesuffix("<|im_end|>")) == dict(fields)
        learnt = [piece for piece, learn in written if learn is Learn.ALL]
        assert len(learnt) == len(fields) + 1
        assert written[0][1] is Learn.NOTHING


def test_json_sum_response_contains_the_correct_sum() -> None:
    rng = random.Random(5)
    seen = 0
    for _ in range(200):
        text = "".join(piece for piece, _ in demo_corpus.json_sample(rng, sum_share=1.0))
        question, answer = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>.*?\n\n(\{.*\})<", text, re.DOTALL)[0]
        numbers = list(map(int, re.findall(r"\d+", question)))
        assert sum(numbers) == next(iter(json.loads(answer).values()))
        seen += 1
    assert seen == 200


def test_plain_text_sample_trains_only_its_continuation() -> None:
    rng = random.Random(6)
    openings = {opening for openings, _ in demo_corpus.TEXT_OPENINGS for opening in openings}
    seen = set()
    for _ in range(600):
        first, *others = demo_corpus.plain_sample(rng)
        if others:
            assert first[1] is Learn.NOTHING
            assert [learn for _, learn in others] == [Learn.ALL]
            seen.add(first[0])
    assert len(openings & seen) > 20


def test_prescribed_text_is_part_of_the_prompt_and_not_of_the_response() -> None:
    (case,) = demo_corpus.held_out_json_sums(1, 1)
    assert case.prompt.endswith('</think>\n\n{"answer":')
    assert re.fullmatch(r"\d+\}", case.expected)
    opened = next(case for case in demo_corpus.opening_cases() if case.prescribed == "My name is")
    assert opened.prompt == "My name is"
    assert opened.expected.startswith("Demo. I am a tiny demo model")
