"""Which parser reads a response: by the request's format and the model's card."""

import json
from typing import Any

import pytest

from dynamo.cpu.config import DEMO_MODEL
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.protocols.openai import decode_chat
from dynamo.text.answer_parsers import Readers
from dynamo.text.guided import guided_decoding
from dynamo.text.tokenizer.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "now"}}
JSON_CALLS = '[{"name": "now", "parameters": {"a": 1}}]'
HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
CALL = [CallBegin(0, "now"), CallArguments(0, '{"a": 1}')]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEMO_MODEL)


def read(tokenizer: Tokenizer, config: RuntimeConfig, text: str, **fields: Any) -> list[Event] | None:
    """Return the parse of a response's text; None where no parser applies."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = decode_chat(json.dumps(body).encode())
    sampling = SamplingOptions(guided_decoding=guided_decoding(request, config))
    prepared = PreprocessedRequest("m", tokenizer.encode("hi"), sampling_options=sampling)
    reader = Readers(config, tokenizer).of_chat(request, prepared)
    if reader is None or reader.make is None:
        return None
    parser = reader.make()
    return [*parser.feed(text), *parser.finish()]


PLAIN, HERMES = RuntimeConfig(), RuntimeConfig(tool_call_parser="hermes")
TAGGED = RuntimeConfig(tool_call_parser="hermes", structural_tag_mode="on")
THINKS = RuntimeConfig(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize("config", [PLAIN, HERMES])
def test_answer_parser_reads_a_forced_call_as_json(tokenizer: Tokenizer, config: RuntimeConfig) -> None:
    assert read(tokenizer, config, JSON_CALLS, tools=[TOOL], tool_choice="required") == CALL
    assert read(tokenizer, config, '{"a": 1}', tools=[TOOL], tool_choice=NAMED) == CALL


def test_answer_parser_reads_a_forced_call_in_the_models_format(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, TAGGED, HERMES_CALL, tools=[TOOL], tool_choice="required") == CALL
    assert read(tokenizer, TAGGED, HERMES_CALL, tools=[TOOL], tool_choice=NAMED) == CALL


def test_answer_parser_reads_an_optional_call_with_the_models_family(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, HERMES, HERMES_CALL, tools=[TOOL]) == CALL
    assert read(tokenizer, PLAIN, HERMES_CALL, tools=[TOOL]) is None
    assert read(tokenizer, HERMES, HERMES_CALL, tools=[TOOL], tool_choice="none") is None


def test_answer_parser_extends_a_continued_message(tokenizer: Tokenizer) -> None:
    def found(begun: str) -> list[Event] | None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
        return read(tokenizer, THINKS, "so</think>yes", messages=messages, continue_final_message=True)

    assert found("<think>Let me see, and") == [ReasoningDelta("so"), ContentDelta("yes")]
    assert found("<think>Hm.</think>Well, ") == [ContentDelta("soyes")]


def test_answer_parser_treats_requested_json_as_content(tokenizer: Tokenizer) -> None:
    form = {"type": "json_object"}
    assert read(tokenizer, HERMES, HERMES_CALL, tools=[TOOL], response_format=form) is None
    found = read(tokenizer, THINKS, '<think>hm</think>{"name": "now"}', tools=[TOOL], response_format=form)
    assert found == [ReasoningDelta("hm"), ContentDelta('{"name": "now"}')]


def test_answer_parser_reads_reasoning_before_calls(tokenizer: Tokenizer) -> None:
    found = read(tokenizer, THINKS, f"<think>hm</think>\n\n{JSON_CALLS}", tools=[TOOL], tool_choice="required")
    assert found == [ReasoningDelta("hm"), *CALL]


OFFERED: dict[str, Any] = {"tools": [TOOL]}


def counted(tokenizer: Tokenizer, config: RuntimeConfig, *texts: str, **fields: Any) -> int:
    """Return the number of reasoning tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    reader = Readers(config, tokenizer).of_chat(decode_chat(json.dumps(body).encode()), PreprocessedRequest("m", [1]))
    assert reader is not None
    reading = reader.reading()
    for text in texts:
        reading.feed(text)
    return reading.reasoning_tokens


def test_answer_parser_does_not_read_reasoning_within_a_call(tokenizer: Tokenizer) -> None:
    output = ["<think>", "a", "</think>", "<tool_call>", '{"na', 'me": "n', 'ow", "arguments": {', "}}", "</tool_call>"]
    assert counted(tokenizer, THINKS, *output, **OFFERED) == 2


def test_answer_parser_counts_reasoning_of_channel_formats(tokenizer: Tokenizer) -> None:
    config = RuntimeConfig(tool_call_parser="harmony", reasoning_parser="gpt_oss")
    output = ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant"]
    output += ["<|channel|>", "commentary to=functions.now", "<|message|>", "{}", "<|call|>"]
    assert counted(tokenizer, config, *output, **OFFERED) >= 2
    assert read(tokenizer, config, "".join(output), **OFFERED) == [
        ReasoningDelta("ab"),
        CallBegin(0, "now"),
        CallArguments(0, "{}"),
    ]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("Hi<|im_end|>\n<|im_start|>assistant\n<think>\n", "a</think>b", [ReasoningDelta("a"), ContentDelta("b")]),
        ("Hi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "b", [ContentDelta("b")]),
        ("Do you know <think>?<|im_end|>\n<|im_start|>assistant\n", "b", [ContentDelta("b")]),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1"])
def test_answer_parser_detects_open_reasoning_at_the_end_of_the_prompt(
    tokenizer: Tokenizer, family: str, prompt: str, text: str, expected: list[Event]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    prepared = PreprocessedRequest("m", tokenizer.encode(prompt))
    reader = Readers(RuntimeConfig(reasoning_parser=family), tokenizer).of_chat(
        decode_chat(json.dumps(body).encode()), prepared
    )
    assert reader is not None
    reading = reader.reading()
    reading.feed(text)
    reading.close("")
    if "know" in prompt and family == "deepseek_r1":
        expected = [ReasoningDelta("b")]  # Its text begins with reasoning unless the request disables it.
    assert reading.take() == expected
