"""Rendering of every chat template equals `apply_chat_template` of Transformers."""

import copy
import json
from typing import Any

import pytest
import tokenizers
from tests.template_styles import STYLES

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatMessage, ContentPart, FunctionCall, ToolCall
from dynamo.text.chat_template.template import ChatTemplate

pytestmark = pytest.mark.reference
pytest.importorskip("transformers")

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & Tag",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Ort"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": ".", "parameters": {"type": "object"}}},
]
ARGUMENTS = '{"city":  "Köln", "days": 2}'

TAKES_OBJECTS = {"llama3", "qwen2.5", "glm", "gpt-oss", "hermes", "mistral v3"}
"""Styles that serialize a call's arguments themselves; the others take the text that the client sent."""

NO_CALLS = {"mistral v7", "gemma2", "gemma3", "phi4", "granite", "command-r"}
NO_SYSTEM = {"gemma2"}


class HuggingFace:
    """`apply_chat_template` of a tokenizer with that template."""

    def __init__(self, source: str) -> None:
        from transformers import PreTrainedTokenizerFast

        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._source = source
        self._wants_null = "content'] is none" in source
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **TOKENS)

    def render(self, turns: list[dict[str, Any]], **options: Any) -> str:
        options.setdefault("add_generation_prompt", True)
        if any(turn["content"] is None for turn in turns) and self._wants_null:
            return self._render_as_given(turns, **options)
        return str(self._tokenizer.apply_chat_template(copy.deepcopy(turns), tokenize=False, **options))

    def _render_as_given(self, turns: list[dict[str, Any]], **options: Any) -> str:
        """Render as versions before transformers 5, which keep null fields, on which such a template depends."""
        from transformers.utils.chat_template_utils import render_jinja_template

        prompts, _ = render_jinja_template([copy.deepcopy(turns)], chat_template=self._source, **options, **TOKENS)
        return str(prompts[0])


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[ChatTemplate, HuggingFace]]:
    return {name: (ChatTemplate({"default": source}, TOKENS), HuggingFace(source)) for name, source in STYLES.items()}


Both = dict[str, tuple[ChatTemplate, HuggingFace]]


def turn_of(message: ChatMessage, name: str) -> dict[str, Any]:
    """Return the variables of the template."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(str(call.function.arguments))
                    if name in TAKES_OBJECTS
                    else call.function.arguments,
                },
            }
            for call in message.tool_calls
        ]
    return turn


def call(call_id: str = "abcdefghi") -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name="weather", arguments=ARGUMENTS))


SYSTEM = ChatMessage(role="system", content=" Be <brief> & exact.\n")
USER = ChatMessage(role="user", content="Grüße! \n")
ANSWER = ChatMessage(role="assistant", content=" Hallo. ")
AGAIN = ChatMessage(role="user", content="And <think>now</think>?")
CALLING = ChatMessage(role="assistant", content=None, tool_calls=[call()])
RESULT = ChatMessage(role="tool", content='{"t": 4.5}', tool_call_id="abcdefghi")

CONVERSATIONS = {
    "user": [USER],
    "answered": [USER, ANSWER, AGAIN],
    "system": [SYSTEM, USER, ANSWER, AGAIN],
    "ends with the answer": [USER, ANSWER],
    "not alternating": [USER, AGAIN],
    "thought": [
        USER,
        ChatMessage(role="assistant", content="<think>\nHm.\n</think>\n\nJa.", reasoning_content=None),
        AGAIN,
    ],
}
CALLED = {
    "called": [USER, CALLING, RESULT],
    "called after a thought": [
        SYSTEM,
        USER,
        ChatMessage(role="assistant", content=None, reasoning_content="I look.", tool_calls=[call()]),
        RESULT,
    ],
    "called with words": [USER, ChatMessage(role="assistant", content="I look.", tool_calls=[call()]), RESULT],
    "answered after a call": [USER, CALLING, RESULT, ChatMessage(role="assistant", content="4.5 °C"), AGAIN],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "thinking": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "not thinking": {"enable_thinking": False, "thinking": False},
    "documents": {"documents": [{"title": "A", "text": "é1"}, {"title": "B", "text": "2"}]},
    "more": {"date_string": "1 Jan 2031", "model_identity": "I.", "controls": {"length": "short"}},
}


def outcome(render: Any) -> str:
    try:
        return str(render())
    except InvalidArgument as error:
        return f"refused: {error}".replace("chat template: ", "")
    except Exception as error:  # The other side may raise any exception for a conversation that it refuses.
        return f"refused: {error}"


@pytest.mark.parametrize(
    ("name", "conversation"),
    [(name, one) for name in STYLES for one in (*CONVERSATIONS, *(() if name in NO_CALLS else CALLED))],
)
def test_template_output_equals_hugging_face(both: Both, name: str, conversation: str) -> None:
    messages = {**CONVERSATIONS, **CALLED}[conversation]
    ours, theirs = both[name]
    turns = [turn_of(message, name) for message in messages]
    for given in (None, TOOLS):
        for label, options in OPTIONS.items():
            for adds in (True, False):
                found = outcome(
                    lambda given=given, options=options, adds=adds: ours.render(
                        messages, tools=given, add_generation_prompt=adds, arguments=options
                    )
                )
                expected = outcome(
                    lambda given=given, options=options, adds=adds: theirs.render(
                        turns, tools=given, add_generation_prompt=adds, **options
                    )
                )
                assert found == expected, label


@pytest.mark.parametrize("name", [name for name in STYLES if name not in NO_SYSTEM])
def test_developer_and_second_system_turns_are_rendered_completely(both: Both, name: str) -> None:
    developer = ChatMessage(role="developer", content="Second.")
    late = ChatMessage(role="system", content="Third.")
    for messages in ([SYSTEM, developer, USER], [developer, USER], [SYSTEM, USER, ANSWER, late, AGAIN]):
        prompt = both[name][0].render(messages)
        for message in messages:
            if message.role in ("system", "developer"):
                assert str(message.content).strip() in prompt


def test_template_without_system_turns_is_reported(both: Both) -> None:
    with pytest.raises(InvalidArgument, match="System role not supported"):
        both["gemma2"][0].render([SYSTEM, USER])


@pytest.mark.parametrize("name", [name for name in STYLES if name not in NO_CALLS])
def test_call_is_rendered_with_any_id_and_without_content(both: Both, name: str) -> None:
    for content in (None, ""):
        calling = ChatMessage(role="assistant", content=content, tool_calls=[call("call-0b1d2c3e4f")])
        result = ChatMessage(role="tool", content="4.5", tool_call_id="call-0b1d2c3e4f")
        prompt = both[name][0].render([USER, calling, result], tools=TOOLS)
        assert "weather" in prompt.split("Grüße!")[-1] or name == "kimi"
        assert "Köln" in prompt
        assert "4.5" in prompt


def test_shortened_id_is_equal_for_call_and_result(both: Both) -> None:
    calling = ChatMessage(role="assistant", tool_calls=[call("call-0b1d2c3e4f")])
    result = ChatMessage(role="tool", content="4.5", tool_call_id="call-0b1d2c3e4f")
    prompt = both["mistral v3"][0].render([USER, calling, result], tools=TOOLS)
    short = prompt.split('"call_id": "')[1].split('"')[0]
    assert len(short) == 9
    assert f'"id": "{short}"' in prompt


@pytest.mark.parametrize(
    ("name", "mark"), [("mistral v7", "[IMG]"), ("gemma3", "<image>"), ("kimi", "<|media|>"), ("llama3", None)]
)
def test_image_is_placed_where_the_template_places_it(both: Both, name: str, mark: str | None) -> None:
    parts = [ContentPart(type="text", text="See "), ContentPart(type="image_url"), ContentPart(type="text", text="!")]
    ours, theirs = both[name]
    prompt = ours.render([ChatMessage(role="user", content=parts)])
    if mark is None:
        assert prompt == theirs.render([{"role": "user", "content": "See \n!"}])
        return
    shown = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "!"}]
    assert prompt == theirs.render([{"role": "user", "content": shown}])
    assert mark in prompt


@pytest.mark.parametrize("name", STYLES)
def test_text_parts_are_joined_by_lines(both: Both, name: str) -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert both[name][0].render([ChatMessage(role="user", content=parts)]) == both[name][0].render(
        [ChatMessage(role="user", content="a\nb")]
    )


@pytest.mark.parametrize("name", [name for name in STYLES if name not in ("glm", "gpt-oss", "command-r")])
def test_continued_final_message_equals_hugging_face(both: Both, name: str) -> None:
    ours, theirs = both[name]
    messages = [USER, ChatMessage(role="assistant", content="The answer is ")]
    turns = [turn_of(message, name) for message in messages]
    expected = theirs.render(turns, add_generation_prompt=False, continue_final_message=True)
    assert ours.render(messages, continue_final_message=True) == expected


def test_template_omits_reasoning_when_it_rejects_reasoning_with_content(both: Both) -> None:
    calling = ChatMessage(role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=[call()])
    prompt = both["gpt-oss"][0].render([USER, calling, RESULT], tools=TOOLS)
    assert "<|channel|>analysis<|message|>I look.<|end|>" in prompt
