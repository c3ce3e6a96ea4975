"""A body becomes a typed request, or an error with upstream's message."""

import base64
import contextlib
import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as openai_text
from openai.types.chat import completion_create_params as openai_chat

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, decode_chat, decode_completion

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode_chat(json.dumps({"model": "m", "messages": HI} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "p"} | fields
    return decode_completion(json.dumps({name: value for name, value in body.items() if value is not ...}).encode())


def complaint(decode: Any, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidArgument) as refused:
        decode(**fields)
    return str(refused.value), refused.value.param


# ---- accepted requests --------------------------------------------------------------------------------------------


def test_chat_request_is_decoded() -> None:
    request = chat(stream=True, stream_options={"include_usage": True}, temperature=1, max_tokens=5, stop="x")
    assert request.stream_options is not None
    assert (request.messages[0].content, request.stream_options.include_usage, request.temperature) == ("hi", True, 1.0)
    assert request.stop_strings == ["x"]


def test_absent_fields_are_none() -> None:
    request = chat()
    assert (request.temperature, request.stop_strings, request.tools, request.nvext) == (None, None, None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": 1}, "service_tier": "auto", "store": True, "modalities": ["text"]},
        {
            "parallel_tool_calls": True,
            "prompt_cache_key": "k",
            "prediction": {"type": "content"},
        },
        {"top_k": 0, "min_p": 0, "repetition_penalty": 2, "logit_bias": {"5": -100}, "stop_token_ids": [1]},
        {"ignore_eos": True, "min_tokens": 0, "include_stop_str_in_output": True, "skip_special_tokens": False},
        {"logprobs": True, "top_logprobs": 20, "n": 1, "seed": -(1 << 63)},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"guided_whitespace_pattern": " ", "guided_decoding_backend": "x"},
        {
            "chat_template_kwargs": {"enable_thinking": False},
            "thinking": {"type": "enabled"},
            "reasoning_effort": "low",
        },
        {"max_tokens": None, "temperature": None, "stream": None},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]},
        {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_fields_accepted_by_openai_and_upstream_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).model == "m"


def test_chat_accepts_the_fields_that_identify_its_user() -> None:
    fields = {"user": "u", "safety_identifier": "s", "metadata": {"a": 1}, "store": True, "prompt_cache_key": "k"}
    assert chat(**fields, prompt_cache_retention="24h").safety_identifier == "s"
    assert complaint(chat, prompt_cache_key="k" * 513)[1] == "prompt_cache_key"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [0], [(1 << 32) - 1]])
def test_four_prompt_forms_are_accepted(prompt: Any) -> None:
    assert completion(prompt=prompt, suffix="", logprobs=5, best_of=1).prompt == prompt


# ---- wrong shape --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800\\u0041"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "metadata": ' + b"[" * 100_000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "unknown": ' + b"[" * 100_000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "unknown": "\\ud800"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]} trailing',
        b'\xef\xbb\xbf{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
    ],
)
@pytest.mark.parametrize("ignore_unsupported", [False, True])
def test_malformed_body_is_refused(body: bytes, ignore_unsupported: bool) -> None:
    with pytest.raises(InvalidArgument, match="Failed to deserialize the JSON body into the target type: "):
        decode_chat(body, ignore_unsupported=ignore_unsupported)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "robot", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "whatever"}, "tool_choice"),
        ({"tool_choice": {"type": "robot"}}, "tool_choice"),
        ({"chat_template_args": {}, "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"nvext": {"annotations": "x"}}, "nvext.annotations"),
        ({"nvext": {"token_data": [-1]}}, "nvext.token_data[0]"),
    ],
)
def test_wrong_type_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    message, named = complaint(chat, **fields)
    assert message.startswith("Failed to deserialize the JSON body into the target type: ")
    assert named == param


@pytest.mark.parametrize("name", ["model", "messages"])
def test_missing_field_is_refused_by_name(name: str) -> None:
    body = {"model": "m", "messages": HI}
    del body[name]
    with pytest.raises(InvalidArgument, match=f"missing required field `{name}`") as refused:
        decode_chat(json.dumps(body).encode())
    assert refused.value.param == name


def test_unknown_fields_are_named_together() -> None:
    assert complaint(chat, foo=1, temperature=0.5, bar=2) == (
        "Validation: Unsupported parameter(s): `foo`, `bar`",
        "foo",
    )


def test_many_unknown_fields_produce_a_bounded_message() -> None:
    message, _ = complaint(chat, **{f"{'x' * 500}{number}": 1 for number in range(1000)})
    assert len(message) < 1000


def test_unknown_fields_are_dropped_when_configured() -> None:
    body = json.dumps(
        {"model": "m", "messages": HI, "foo": 1, "temperature": 1, "logit_bias": {"5": 1}, "metadata": 1 << 80}
    ).encode()
    request = decode_chat(body, ignore_unsupported=True)
    assert (request.model, request.temperature, request.logit_bias) == ("m", 1.0, {5: 1.0})


def test_wrong_type_is_an_error_despite_unknown_fields() -> None:
    body = json.dumps({"foo": 1, "model": 5, "messages": HI}).encode()
    with pytest.raises(InvalidArgument, match="Expected `str`"):
        decode_chat(body, ignore_unsupported=True)


@pytest.mark.parametrize(
    "name", ["best_of", "echo", "priority", "use_beam_search", "documents", "chat_template", "request_id"]
)
def test_chat_field_unsupported_by_upstream_is_refused_with_its_message(name: str) -> None:
    assert complaint(chat, **{name: 1}) == (f"Validation: Unsupported parameter(s): `{name}`", name)


# ---- out of range -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "Validation: Temperature must be between 0 and 2, got 3"),
        ({"temperature": -0.1}, "Validation: Temperature must be between 0 and 2, got -0.1"),
        ({"top_p": 1.5}, "Validation: Top_p must be between 0 and 1, got 1.5"),
        ({"max_tokens": 0}, "Validation: Max tokens must be greater than 0, got 0"),
        ({"max_tokens": 100_000_000}, "Validation: Max tokens must not exceed 1048576, got 100000000"),
        ({"max_completion_tokens": 0}, "Validation: Max completion tokens must be greater than 0, got 0"),
        ({"frequency_penalty": 3}, "Validation: Frequency penalty must be between -2 and 2, got 3"),
        ({"presence_penalty": -3}, "Validation: Presence penalty must be between -2 and 2, got -3"),
        ({"repetition_penalty": 0}, "Validation: Repetition penalty must be between 0 and 2, got 0"),
        ({"min_p": 2}, "Validation: Min_p must be between 0 and 1, got 2"),
        ({"top_k": -2}, "Validation: Top_k must be null or greater than or equal to -1"),
        ({"n": 0}, "Validation: n must be between 1 and 128, got 0"),
        ({"n": 129}, "Validation: n must be between 1 and 128, got 129"),
        ({"logit_bias": {"1": 101}}, "Validation: Logit bias for token '1' must be between -100 and 100, got 101"),
        ({"logit_bias": {"-1": 1}}, "Validation: Logit bias key must be a non-negative 32-bit integer token id"),
        ({"stop": ""}, "Validation: Stop sequence cannot be empty"),
        ({"stop": []}, "Validation: Stop sequences array cannot be empty"),
        ({"stop": ["a", ""]}, "Validation: Stop sequence at index 1 cannot be empty"),
        ({"stop": ["a"] * 33}, "Maximum of 32 stop sequences allowed, got 33"),
        (
            {"stream_options": {"include_usage": True}},
            "Validation: The 'stream_options' field is only allowed when 'stream' is set to true.",
        ),
        ({"messages": []}, "Validation: The 'messages' field cannot be empty. At least one message is required."),
        ({"logprobs": True, "top_logprobs": 21}, "Validation: Top_logprobs must be between 0 and 20, got 21"),
        ({"top_logprobs": 2}, "Validation: Top_logprobs is only allowed when logprobs is true"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "Validation: Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "Only one guided-decoding constraint can be set; received: regex, choice",
        ),
        ({"tool_choice": "required"}, 'Validation: tool_choice is "required" but tools is empty'),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "Validation: tools[0].function.name must be a non-empty string",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "Validation: tools[0].function.parameters must be a JSON schema object",
        ),
    ],
)
def test_chat_value_out_of_range_is_refused_with_the_upstream_message(fields: dict[str, Any], message: str) -> None:
    output, param = complaint(chat, **fields)
    assert output == message
    assert param is not None
    assert param.split("[")[0] in fields | {"stop": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "Validation: Prompt string cannot be empty"),
        ({"prompt": []}, "Validation: Prompt string array cannot be empty"),
        ({"prompt": ["a", ""]}, "Validation: Prompt string at index 1 cannot be empty"),
        ({"prompt": [[]]}, "Validation: Prompt integer array at index 0 cannot be empty"),
        (
            {"prompt": ["a"] * 129},
            "Validation: Total choices (batch_size × n = 129 × 1 = 129) exceeds maximum of 128",
        ),
        ({"logprobs": 6}, "Validation: Logprobs must be between 0 and 5, got 6"),
        ({"best_of": 2, "n": 3}, "Validation: Best_of must be greater than or equal to n, got best_of=2 and n=3"),
    ],
)
def test_completion_value_out_of_range_is_refused_with_the_upstream_message(
    fields: dict[str, Any], message: str
) -> None:
    assert complaint(completion, **fields)[0] == message


@pytest.mark.parametrize("prompt", [5, None, [1, "a"], [[1], "a"], [1.5], [-1], [1 << 32], [[-1]], {}])
def test_unknown_prompt_form_is_refused(prompt: Any) -> None:
    message, _ = complaint(completion, prompt=prompt)
    assert message.startswith("Failed to deserialize the JSON body into the target type: ")


# ---- fields that this release does not support --------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": {"voice": "alloy"}},
        {"modalities": ["text", "audio"]},
        {"web_search_options": {}},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]},
    ],
)
def test_unsupported_chat_option_is_refused_by_name(fields: dict[str, Any]) -> None:
    message, param = complaint(chat, **fields)
    assert "supported by this release" in message
    assert param is not None
    assert param.split(".")[0].split("[")[0] in fields


EMBEDS = base64.b64encode(bytes(100)).decode()


@pytest.mark.parametrize("prompt", [None, "", ...])
def test_completion_accepts_prompt_embeds_instead_of_a_prompt(prompt: Any) -> None:
    assert completion(prompt=prompt, prompt_embeds=EMBEDS).prompt_embeds == EMBEDS


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": "a"}, "prompt and prompt_embeds are mutually exclusive", "prompt_embeds"),
        ({"prompt_embeds": "!"}, "prompt_embeds must be base64", "prompt_embeds"),
        ({"prompt_embeds": "AAAA"}, "must be at least 100 bytes, got 3 bytes", "prompt_embeds"),
        ({"prompt_embeds": "A" * (14 << 20)}, "exceeds maximum size of 10MB", "prompt_embeds"),
        ({"suffix": "x"}, "suffix is not supported together with prompt_embeds", "suffix"),
        ({"echo": True}, "echo is not supported together with prompt_embeds", "echo"),
        ({"nvext": {"token_data": [1]}}, "nvext.token_data are mutually exclusive", "prompt_embeds"),
    ],
)
def test_completion_refuses_invalid_prompt_embeds(fields: Any, message: str, param: str) -> None:
    assert complaint(completion, **{"prompt": "", "prompt_embeds": EMBEDS} | fields)[1] == param
    assert message in complaint(completion, **{"prompt": "", "prompt_embeds": EMBEDS} | fields)[0]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1, "stream": True}, {"best_of": 2, "stream": True}])
def test_completion_option_that_requires_the_whole_response_cannot_be_streamed(fields: dict[str, Any]) -> None:
    message, param = complaint(completion, **fields)
    assert "cannot be streamed" in message
    assert param in fields


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "video_url", "video_url": {"url": "s3://bucket/a.mp4"}},
        {"type": "audio_url", "audio_url": {"url": "http://example.com/a.wav"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_media_parts_of_a_message_are_accepted(part: dict[str, Any]) -> None:
    assert chat(messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]).messages


@pytest.mark.parametrize(
    ("part", "complains"),
    [
        ({"type": "image_url", "image_url": {"url": "nowhere"}}, "is not a URL"),
        ({"type": "image_url"}, "missing field `image_url`"),
        ({"type": "image_url", "image_url": {}}, "missing required field `url`"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "midi"}}, "expected one of wav"),
    ],
)
def test_unsupported_media_url_is_refused(part: dict[str, Any], complains: str) -> None:
    message, param = complaint(chat, messages=[{"role": "user", "content": [part]}])
    assert complains in message
    assert (param or "").startswith("messages[")


def test_assistant_message_with_an_image_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    message, _ = complaint(chat, messages=[{"role": "assistant", "content": [part]}])
    assert "role `assistant`" in message


@pytest.mark.parametrize("thinking", ["yes", {"type": "bogus"}, {}])
def test_invalid_thinking_value_is_refused(thinking: Any) -> None:
    _, param = complaint(chat, thinking=thinking)
    assert param == "thinking"


def test_tool_choice_must_name_a_listed_tool() -> None:
    named = {"type": "function", "function": {"name": "other"}}
    message, param = complaint(chat, tools=[TOOL], tool_choice=named)
    assert (message, param) == ('Validation: tool named "other" in tool_choice is not present in tools', "tool_choice")


def test_completion_options_with_neutral_values_are_accepted() -> None:
    assert completion(echo=False, best_of=1, n=1, no_stop_trim=False).echo is False


@pytest.mark.parametrize(("name", "instead"), [("function_call", "tool_choice"), ("functions", "tools")])
def test_deprecated_openai_field_is_not_implemented(name: str, instead: str) -> None:
    with pytest.raises(
        HttpError, match=f"`{name}` is deprecated. Please migrate to use `{instead}` instead"
    ) as refused:
        chat(**{name: []})
    assert refused.value.code == 501


def test_deprecated_function_call_message_is_refused() -> None:
    message = {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}
    assert "tool_calls" in complaint(chat, messages=[message])[0]


# ---- arbitrary requests -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(["user", "text"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "foo", "\x00"]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
    optional=dict.fromkeys(("content", "tool_calls", "tool_call_id", "name", "function_call"), JSON),
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(FIELDS, JSON, max_size=4), messages=st.lists(MESSAGE, max_size=3), ignore=st.booleans())
def test_any_json_body_is_decoded_or_refused(
    fields: dict[str, Any], messages: list[dict[str, Any]], ignore: bool
) -> None:
    body = json.dumps({"model": "m", "messages": messages, "prompt": "x"} | fields).encode("utf-8", "replace")
    for decode, kind in ((decode_chat, ChatCompletionRequest), (decode_completion, CompletionRequest)):
        with contextlib.suppress(InvalidArgument, HttpError):
            assert isinstance(decode(body, ignore_unsupported=ignore), kind)


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=60), at=st.integers(0, 200))
def test_any_bytes_are_decoded_or_refused(body: bytes, at: int) -> None:
    good = json.dumps(
        {"model": "m", "messages": HI, "temperature": 1.0, "stop": ["a"], "nvext": {"dp_rank": 1}}
    ).encode()
    for broken in (body, good[:at] + body + good[at:], good[:at] + body + good[at + len(body) :]):
        with contextlib.suppress(InvalidArgument, HttpError):
            assert isinstance(decode_chat(broken), ChatCompletionRequest)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"model": "\xff"}', b'{"model":' * 50_000])
def test_deeply_nested_or_non_text_body_is_an_invalid_argument(body: bytes) -> None:
    for decode in (decode_chat, decode_completion):
        with pytest.raises(InvalidArgument):
            decode(body)


# ---- requests of OpenAI's own client ------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": True, "n": 2, "best_of": 2,
    "stream_options": {"include_usage": True}, "stop": ["x"], "logit_bias": {"5": 1}, "response_format": {"type": "text"},
    "tools": [TOOL], "tool_choice": "auto", "top_logprobs": 2, "logprobs": True, "reasoning_effort": "low", "seed": 5,
    "modalities": ["audio"], "audio": {"voice": "alloy", "format": "wav"}, "metadata": {"a": "b"}, "store": False,
    "functions": [{"name": "f"}], "function_call": "auto", "web_search_options": {}, "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k",
    "echo": True, "suffix": "x", "temperature": 1, "top_p": 1, "presence_penalty": 1, "frequency_penalty": 1,
    "max_tokens": 5, "max_completion_tokens": 5,
}  # fmt: skip
NEEDS = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}, "tool_choice": {"tools": [TOOL]}}
WITHOUT_EFFECT = {"user", "metadata", "store", "prompt_cache_key", "prediction"}
"""Fields that describe the request and do not affect the response."""


@pytest.mark.parametrize(
    ("decode", "params"),
    [
        (chat, openai_chat.CompletionCreateParamsBase),
        (completion, openai_text.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_client_is_honoured_or_refused_by_name(decode: Any, params: Any) -> None:
    for name in {*get_type_hints(params), "stream"}:
        given = {name: VALUES.get(name, "x"), **NEEDS.get(name, {})}
        if name == "logprobs" and decode is completion:
            given = {name: 2}
        request, refusal = tried(decode, given)
        is_honoured = request is not None and (name in WITHOUT_EFFECT or getattr(request, name) is not None)
        assert is_honoured or name in refusal, name


def tried(decode: Any, fields: dict[str, Any]) -> tuple[Any, str]:
    """The request, or why it is refused."""
    try:
        return decode(**fields), ""
    except (InvalidArgument, HttpError) as error:
        return None, str(error)
