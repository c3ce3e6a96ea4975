"""A conversation is rendered as Hugging Face renders it, and a template's refusal is the caller's to read."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.model_card.card import ModelFiles
from dynamo.protocols.openai import ChatMessage, ContentPart, FunctionCall, ToolCall
from dynamo.text.chat_template.template import ChatTemplate, special_tokens_of

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

HEADERS = """{{ bos_token }}
{%- set today = strftime_now("%d %b %Y") if strftime_now is defined else "" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|h|>system<|/h|>\\n\\nToday: " + today + "\\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- '<|h|>' + message['role'] + '<|/h|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
    {{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
    {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}
    {{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""

LOOPS = """{% for message in messages %}
  {%- if loop.index0 > 5 %}{% break %}{% endif %}
  {%- if not message.content %}{% continue %}{% endif %}
  {%- set ns = namespace(depth=0) %}
  {%- for char in message.content %}{%- set ns.depth = ns.depth + 1 %}{%- endfor %}
<{{ message.role }} length={{ ns.depth }}>{{ message.content | upper }}</{{ message.role }}>
{% endfor %}
{%- macro prompt(role) %}<{{ role }}>{% endmacro %}
{%- if add_generation_prompt %}{{ prompt('assistant') }}{% endif %}"""

FAMILIES = {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING, "loops": LOOPS}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter für <Ort> & Zeit", "parameters": {"type": "object"}},
    }
]


def user(content: Any) -> ChatMessage:
    return ChatMessage(role="user", content=content)


def assistant(content: str | None = None, **fields: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, **fields)


def system(content: str) -> ChatMessage:
    return ChatMessage(role="system", content=content)


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS)


@pytest.fixture(scope="session")
def hugging_face() -> Callable[..., str]:
    """Renders as `tokenizer.apply_chat_template` does."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source: str, turns: list[dict[str, Any]], **options: Any) -> str:
        tools = options.pop("tools", None)
        prompts, _ = render_jinja_template([turns], tools=tools, chat_template=source, **options, **TOKENS)
        return str(prompts[0])

    return render


TEXT = st.text(st.sampled_from("ab <>&'\"\n\té日{}%"), max_size=12)
CONVERSATIONS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=7)


def outcome(render: Callable[[], str]) -> tuple[str, str]:
    """The prompt, or the complaint."""
    try:
        return "prompt", render()
    except Exception as error:
        return "complaint", str(error).removeprefix("chat template: ")


@pytest.mark.reference
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(turns=CONVERSATIONS, add_generation_prompt=st.booleans(), with_tools=st.booleans())
def test_chat_template_renders_any_conversation_like_hugging_face(
    hugging_face: Callable[..., str],
    family: str,
    turns: list[tuple[str, str]],
    add_generation_prompt: bool,
    with_tools: bool,
) -> None:
    ours = template(FAMILIES[family])
    dicts = [{"role": role, "content": content} for role, content in turns]
    tools = TOOLS if with_tools else None
    expected = outcome(
        lambda: hugging_face(FAMILIES[family], dicts, tools=tools, add_generation_prompt=add_generation_prompt)
    )
    assert outcome(lambda: ours.render_turns(dicts, tools, add_generation_prompt)) == expected


@pytest.mark.reference
@pytest.mark.parametrize("family", ["chatml", "headers", "alternating"])
@settings(max_examples=40, deadline=None)
@given(text=TEXT)
def test_chat_template_continues_a_final_message_like_hugging_face(
    hugging_face: Callable[..., str], family: str, text: str
) -> None:
    dicts = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    ours = template(FAMILIES[family])
    try:
        expected = hugging_face(FAMILIES[family], dicts, continue_final_message=True)
    except ValueError:
        with pytest.raises(InvalidArgument, match="continue_final_message"):
            ours.render([user("q"), assistant(text)], continue_final_message=True)
        return
    assert ours.render([user("q"), assistant(text)], continue_final_message=True) == expected


def test_chat_template_cannot_continue_a_modified_final_message() -> None:
    with pytest.raises(InvalidArgument, match="does not show the final message") as refused:
        template(LOOPS).render([user("q"), assistant("text")], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_chat_template_does_not_escape_json_for_html() -> None:
    prompt = template(CHATML).render([user("hi")], tools=TOOLS)
    assert json.dumps(TOOLS[0], ensure_ascii=False) in prompt


def test_chat_template_refusal_reaches_the_caller() -> None:
    with pytest.raises(InvalidArgument, match="chat template: Conversation roles must alternate") as refused:
        template(ALTERNATING).render([user("a"), user("b")])
    assert refused.value.param == "messages"


def test_chat_template_error_names_its_cause() -> None:
    with pytest.raises(InvalidArgument, match="chat template: 'dict object' has no attribute 'colour'"):
        template("{{ messages[0].colour.name }}").render([user("a")])


def test_chat_template_cannot_access_objects_outside_its_sandbox() -> None:
    with pytest.raises(InvalidArgument, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}").render([user("a")])
    with pytest.raises(InvalidArgument, match="chat template"):
        template("{{ messages.append(1) }}").render([user("a")])


def test_chat_template_that_does_not_compile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template: "):
        template("{% if %}")


def test_chat_template_message_key_does_not_hide_a_dictionary_method() -> None:
    turns = [{"role": "user", "content": "x", "items": "mine"}]
    assert template("{% for key, value in messages[0].items() %}{{ key }},{% endfor %}").render_turns(turns) == (
        "role,content,items,"
    )


def test_chat_template_joins_message_parts_by_lines() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert "user\na\nb<|im_end|>" in template(CHATML).render([user(parts)])


def test_chat_template_with_part_loops_receives_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert template(source).render([system("s"), user(parts), user("c")]) == "[s][a][b][c]"


def test_chat_template_renders_developer_as_system_unless_the_template_supports_the_role() -> None:
    message = ChatMessage(role="developer", content="x")
    assert "<|im_start|>system\nx" in template(CHATML).render([message])
    accepts_developer = (
        "{% for m in messages %}{% if m.role == 'developer' %}DEV {% endif %}{{ m.content }}{% endfor %}"
    )
    assert template(accepts_developer).render([message]) == "DEV x"


def test_chat_template_joins_leading_system_messages_it_would_drop() -> None:
    only_first = "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% endif %}{{ messages[-1].content }}"
    turns = [system("a"), ChatMessage(role="developer", content="b"), user("c")]
    assert template(only_first).render(turns) == "<a\n\nb>c"
    assert template(CHATML).render(turns, add_generation_prompt=False).count("<|im_start|>system") == 2


def test_chat_template_joins_system_messages_when_it_refuses_a_second_one() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system') }}"
        "{% endif %}{{ m.content }}|{% endfor %}"
    )
    assert template(source).render([system("a"), system("b"), user("c")]) == "a\n\nb|c|"


CALL = ToolCall(id="callabcde", function=FunctionCall(name="weather", arguments='{"city":  "Köln"}'))


def test_chat_template_receives_call_arguments_as_text_when_rendered_as_text() -> None:
    assert '"arguments": {"city":  "Köln"}}' in template(CHATML).render([user("q"), assistant(tool_calls=[CALL])])


def test_chat_template_receives_call_arguments_as_an_object_when_rendered_as_json() -> None:
    assert '"parameters": {"city": "Köln"}}' in template(HEADERS).render([user("q"), assistant(tool_calls=[CALL])])


def test_chat_template_receives_call_arguments_that_are_not_objects_as_text() -> None:
    call = ToolCall(function=FunctionCall(name="weather", arguments="not json"))
    assert '"parameters": "not json"}' in template(HEADERS).render([user("q"), assistant(tool_calls=[call])])


def test_chat_template_for_tools_is_used_where_the_model_has_one() -> None:
    chat = ChatTemplate({"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | length }}"})
    assert chat.render([user("x")]) == "plain x"
    assert chat.render([user("x")], tools=TOOLS) == "tools 1"


def test_chat_template_arguments_of_a_request_do_not_replace_the_conversation() -> None:
    arguments = {"enable_thinking": False, "messages": [], "add_generation_prompt": False}
    prompt = template(CHATML).render([user("x")], arguments=arguments)
    assert prompt == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_chat_template_date_comes_from_the_given_clock() -> None:
    chat = ChatTemplate({"default": '{{ strftime_now("%Y-%m-%d") }}'}, now=lambda: datetime(2024, 7, 26))  # noqa: DTZ001
    assert chat.render([user("x")]) == "2024-07-26"


def test_chat_template_receives_earlier_reasoning_and_names() -> None:
    source = "{{ messages[-1].reasoning_content }}|{{ messages[0].name }}|{{ messages[1].tool_call_id }}"
    turns = [
        ChatMessage(role="user", content="q", name="Ada"),
        ChatMessage(role="tool", content="42", tool_call_id="c1"),
        assistant("a", reasoning="because"),
    ]
    assert template(source).render(turns) == "because|Ada|c1"


# ---- files --------------------------------------------------------------------------------------------------------


def _files(tmp_path: Path, tokenizer_config: dict[str, Any], jinja: str | bytes | None = None) -> ModelFiles:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    path = tmp_path / "chat_template.jinja"
    if jinja is not None:
        path.write_bytes(jinja.encode() if isinstance(jinja, str) else jinja)
    return ModelFiles(
        config="",
        tokenizer="",
        tokenizer_config=str(tmp_path / "tokenizer_config.json"),
        chat_template=None if jinja is None else str(path),
    )


def test_chat_template_file_takes_precedence_over_the_configuration(tmp_path: Path) -> None:
    chat = ChatTemplate.from_files(_files(tmp_path, {"chat_template": "config"}, "file"))
    assert chat is not None
    assert chat.render([user("x")]) == "file"


def test_chat_templates_with_names_are_read_from_a_list(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t"}]
    chat = ChatTemplate.from_files(_files(tmp_path, {"chat_template": named, "eos_token": {"content": "E"}}))
    assert chat is not None
    assert (chat.render([user("x")]), chat.render([user("x")], tools=TOOLS)) == ("dE", "t")


def test_chat_template_is_optional(tmp_path: Path) -> None:
    assert ChatTemplate.from_files(_files(tmp_path, {})) is None
    assert ChatTemplate.from_files(ModelFiles(config="", tokenizer="")) is None


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}], {"default": "x"}])
def test_chat_template_of_wrong_type_is_reported_with_its_file(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.from_files(_files(tmp_path, {"chat_template": value}))


def test_chat_template_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: "):
        ChatTemplate.from_files(_files(tmp_path, {}, b"\xff"))


def test_chat_template_special_tokens_are_read_in_both_formats() -> None:
    config = {
        "bos_token": None,
        "eos_token": {"content": "</s>"},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
    }
    assert special_tokens_of(config) == {"eos_token": "</s>", "additional_special_tokens": ["<a>", "<b>"]}
