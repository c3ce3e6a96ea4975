"""The main path over the scripted engine: an assembled stream equals the whole response."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scripted_engine.assembly import chat_of, plain, text_of
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import ScriptedStack, ScriptedStackPool

from dynamo.core.errors import NotFound
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.openai_ranges import RequestBounds
from dynamo.serving import completion_choices
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.pipeline import Pipeline, turns_of
from dynamo.serving.request_state import RequestState

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": 2}}\n</tool_call>'
TEXTS = {
    "ascii": "The quick brown fox jumps over the lazy dog. 1 + 1 = 2!",
    "multibyte": "Быстрая лиса прыгает; 快速的棕色狐狸; naïve café — “quoted” … ½ of 2²",
    "emoji": "Family 👩‍👩‍👧‍👦, flag 🇳🇴, skin 👍🏽, heart ❤️, keycap 1️⃣ done",
    "code": 'def f(x: int) -> str:\n\treturn f"<{x}>\\n" if x < 3 else "</tool>"\n\n\n# ```\n',
    "reasoning": "<think>\nTwo and two… 🤔 is <four>.\n</think>\n\nFour.",
    "only reasoning": "<think>and on and on",
    "a call": "Let me look.\n" + CALL % "Oslo",
    "calls": CALL % "Osló 🇳🇴" + "\n" + CALL % "Rome",
    "reasoning and calls": "<think>Weather?</think>" + CALL % "Bodø" + "\n" + CALL % "Åse",
    "a call cut off": (CALL % "Oslo")[:60],
    "no call after all": "<tool_call>nonsense</tool_call> and <tool_cal> more <",
    "nothing": "",
}
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 5), max_size=2)


def both(
    stacks: ScriptedStackPool, stack: ScriptedStack, send_request: Callable[..., Any], script: Script, **fields: Any
) -> tuple[Any, Any]:
    """Return the complete response and the events of the stream."""
    whole = stacks.run(send_request(script, temperature=0, **fields))
    stream = stacks.run(
        send_request(script, temperature=0, stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert (whole.status, stream.status) == (200, 200), (whole.body, stream.body)
    return whole.json, stream.events


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("logprobs", [False, True])
@given(sizes=SIZES, cuts=CUTS)
@settings(max_examples=6)
def test_stream_and_unary_chat_have_equal_content(
    stacks: ScriptedStackPool, name: str, logprobs: bool, sizes: list[int], cuts: list[int]
) -> None:
    script = Script([TEXTS[name]], sizes=sizes, cuts=cuts)
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    whole, events = both(stacks, stacks.parsed, stacks.parsed.chat, script, tools=[WEATHER], **wanted)
    assert chat_of(events) == plain(whole)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("name", TEXTS)
@given(sizes=SIZES, cuts=CUTS)
@settings(max_examples=6)
def test_chat_content_is_independent_of_token_boundaries(
    stacks: ScriptedStackPool, name: str, sizes: list[int], cuts: list[int]
) -> None:
    stack = stacks.parsed
    straight = stacks.run(stack.chat(Script([TEXTS[name]]), tools=[WEATHER])).json
    cut = stacks.run(stack.chat(Script([TEXTS[name]], sizes=sizes, cuts=cuts), tools=[WEATHER])).json
    assert plain(cut)["choices"] == plain(straight)["choices"]


@pytest.mark.parametrize("name", TEXTS)
@given(sizes=SIZES, cuts=CUTS)
@settings(max_examples=3)
def test_chat_without_parsers_returns_the_text_unchanged(
    stacks: ScriptedStackPool, name: str, sizes: list[int], cuts: list[int]
) -> None:
    script = Script([TEXTS[name]], sizes=sizes, cuts=cuts)
    whole, events = both(stacks, stacks.plain, stacks.plain.chat, script)
    assert chat_of(events) == plain(whole)
    assert whole["choices"][0]["message"]["content"] == (TEXTS[name] or None)


@given(sizes=SIZES, cuts=CUTS, stop=st.sampled_from([None, "fox", "👩‍👧", " jum", "нет", "\n\t"]))
@settings(max_examples=25)
def test_stop_string_ends_a_completion_at_any_token_boundary(
    stacks: ScriptedStackPool, sizes: list[int], cuts: list[int], stop: str | None
) -> None:
    text = TEXTS["ascii"] + TEXTS["emoji"] + TEXTS["code"]
    fields: dict[str, Any] = {} if stop is None else {"stop": [stop, "never said"]}
    stack = stacks.plain
    script = Script([text], sizes=sizes, cuts=cuts)
    whole, events = both(stacks, stack, stack.complete, script, **fields)
    expected = text if stop is None else text.partition(stop)[0]
    assert whole["choices"][0]["text"] == expected
    assert text_of(events)["choices"] == whole["choices"]


@given(sizes=SIZES)
@settings(max_examples=5)
def test_several_choices_have_separate_content(stacks: ScriptedStackPool, sizes: list[int]) -> None:
    names = ["a call", "reasoning", "emoji"]
    script = Script([TEXTS[name] for name in names], sizes=sizes)
    stack = stacks.parsed
    whole, events = both(stacks, stack, stack.chat, script, n=3, tools=[WEATHER])
    assert chat_of(events) == plain(whole)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls", "stop", "stop"]


def test_tool_call_markers_are_parsed_and_removed_from_the_response(stacks: ScriptedStackPool) -> None:
    message = stacks.run(stacks.parsed.chat(Script([TEXTS["reasoning and calls"]]), tools=[WEATHER])).json
    choice = message["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Weather?"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "get_weather"]
    assert all(call["id"].startswith("call-") for call in choice["message"]["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"


KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)


@given(sizes=SIZES)
@settings(max_examples=5)
def test_special_token_markers_reach_only_the_parser(
    stacks: ScriptedStackPool, special_dir: Path, sizes: list[int]
) -> None:
    stack = stacks.opened("--dyn-tool-call-parser", "kimi_k2", model=str(special_dir))
    script = Script(["Let me look.<|im_start|>" + KIMI_CALL], sizes=sizes)
    whole, events = both(stacks, stack, stack.chat, script, tools=[WEATHER])
    assert chat_of(events) == plain(whole)
    message = whole["choices"][0]["message"]
    assert message["content"] == "Let me look."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Oslo"}']
    without_tools = stacks.run(stack.chat(script)).json["choices"][0]["message"]
    assert "<|" not in without_tools["content"]


def test_reasoning_tokens_are_counted(stacks: ScriptedStackPool) -> None:
    usage = stacks.run(stacks.parsed.chat(Script(["<think>\nhm\n</think>\n\nyes"], cached=7))).json["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    plain_usage = stacks.run(stacks.plain.chat(Script(["hm"]))).json["usage"]
    assert "completion_tokens_details" not in plain_usage


def test_prompt_that_opens_reasoning_starts_the_response_in_reasoning(stacks: ScriptedStackPool) -> None:
    opened = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ids = stacks.parsed.models.find("m", "Chat").preprocessor.tokenizer.encode(opened)
    answer = stacks.run(stacks.parsed.chat(Script(["hm</think>yes"]), nvext={"token_data": ids})).json
    assert answer["choices"][0]["message"]["reasoning_content"] == "hm"
    assert answer["choices"][0]["message"]["content"] == "yes"


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'),
        ("required", (CALL % "Oslo").replace(', "days": 2', "")),
        (NAMED, '{"city": "Oslo"}'),
        (NAMED, '<think>well</think>{"city": "Oslo"}'),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=5)
def test_forced_tool_call_returns_one_call(stacks: ScriptedStackPool, choice: Any, text: str, cuts: list[int]) -> None:
    stack = stacks.parsed
    whole, events = both(stacks, stack, stack.chat, Script([text], cuts=cuts), tools=[WEATHER], tool_choice=choice)
    assert chat_of(events) == plain(whole)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert stack.engine.requests[-1].sampling_options.guided_decoding is not None


def test_tools_with_tool_choice_none_are_hidden_and_not_parsed(stacks: ScriptedStackPool) -> None:
    stack = stacks.parsed
    answer = stacks.run(stack.chat(Script([CALL % "Oslo"]), tools=[WEATHER], tool_choice="none")).json
    without = stack.engine.requests[-1].token_ids
    stacks.run(stack.chat(Script(["x"])))
    assert answer["choices"][0]["message"]["content"] == CALL % "Oslo"
    assert without == stack.engine.requests[-1].token_ids


def test_parallel_tool_calls_false_returns_one_call(stacks: ScriptedStackPool) -> None:
    answer = stacks.run(stacks.parsed.chat(Script([TEXTS["calls"]]), tools=[WEATHER], parallel_tool_calls=False)).json
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


def test_tool_call_cut_at_the_token_limit_keeps_finish_reason_length(stacks: ScriptedStackPool) -> None:
    script = Script([CALL % "Oslo"], finish_reason="length")
    assert stacks.run(stacks.parsed.chat(script, tools=[WEATHER])).json["choices"][0]["finish_reason"] == "length"


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["plain", "parsed"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "status"), [("InvalidArgument", 400), ("Unknown", 500), ("ResponseTimeout", 504)])
def test_pipeline_error_before_the_first_token_keeps_its_status(
    stacks: ScriptedStackPool, stack: str, stream: bool, kind: str, status: int
) -> None:
    script = Script(["Hello"], fails_after=0, fails_as=kind)
    answer = stacks.run(getattr(stacks, stack).chat(script, stream=stream))
    assert answer.status == status
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("stack", ["plain", "parsed"])
def test_pipeline_error_after_the_first_token_is_an_event_and_ends_the_stream(
    stacks: ScriptedStackPool, stack: str
) -> None:
    script = Script(["Hello you there"], fails_after=2, fails_as="Unknown")
    answer = stacks.run(getattr(stacks, stack).chat(script, stream=True))
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == 500


def test_client_disconnect_stops_the_engine(stacks: ScriptedStackPool) -> None:
    async def leave() -> None:
        stack = stacks.parsed
        exchange, wire = stack.begin(
            stack.pipeline.handle_chat,
            {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True,
             "nvext": {"annotations": [Script(["long " * 500]).annotation()]}},
        )  # fmt: skip
        async with asyncio.timeout(30):
            await wire.written.wait()
            stack.engine.cancelled.clear()
            exchange.left()
            await stack.engine.cancelled.wait()

    stacks.run(leave())


# ---- additional response fields -------------------------------------------------------------------------------------


def test_continuous_usage_is_in_every_chunk(stacks: ScriptedStackPool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for stack in (stacks.plain, stacks.parsed):
        events = stacks.run(stack.chat(Script(["Hi you there"]), stream=True, stream_options=options)).events
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3


def test_annotations_precede_the_first_chunk(stacks: ScriptedStackPool) -> None:
    names = ["request_id", "token_ids", "formatted_prompt"]
    answer = stacks.run(stacks.plain.chat(Script(["Hi"]), stream=True, nvext={"annotations": names}))
    first = answer.text_events[: len(names)]
    assert [event.partition("\n")[0] for event in first] == [f"event: {name}" for name in names]
    assert first[2].endswith('assistant\\n<think>\\n\\n</think>\\n\\n"')


def test_requested_service_tier_is_reported_in_the_response(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    assert stacks.run(stack.chat(Script(["Hi"]), service_tier="priority")).json["service_tier"] == "default"
    events = stacks.run(stack.chat(Script(["Hi"]), service_tier="auto", stream=True)).events
    assert {event["service_tier"] for event in events} == {"default"}
    assert "service_tier" not in stacks.run(stack.chat(Script(["Hi"]))).json


# ---- text completions -----------------------------------------------------------------------------------------------


def test_best_of_returns_the_highest_scored_texts(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    script = Script(["bad", "best", "good"], scores=[-9.0, -1.0, -2.0])
    choices = stacks.run(stack.complete(script, best_of=3, n=2)).json["choices"]
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in choices] == [
        (0, "best", None),
        (1, "good", None),
    ]
    requested = stack.engine.requests[-1].sampling_options
    assert (requested.n, requested.best_of) == (3, 3)


def test_best_of_uses_token_logprobs_without_cumulative_ones(stacks: ScriptedStackPool) -> None:
    script = Script(["one two three four", "one"])
    choices = stacks.run(stacks.plain.complete(script, best_of=2)).json["choices"]
    assert [choice["text"] for choice in choices] == ["one"]


def test_echo_returns_prompt_logprobs_reported_by_the_worker(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    tokenizer = stack.models.find("m", "Completions").preprocessor.tokenizer
    _, second = tokenizer.encode("Hi you")
    data = {"prompt_logprobs": [None, {str(second): {"logprob": -0.5, "rank": 2}, "5": {"logprob": -0.1, "rank": 1}}]}
    script = Script(["there"], engine_data=data)
    choice = stacks.run(stack.complete(script, prompt="Hi you", echo=True, logprobs=1)).json["choices"][0]
    assert choice["text"] == "Hi youthere"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["Hi", " you"]
    assert logprobs["token_logprobs"][:2] == [None, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert list(logprobs["top_logprobs"][1].values()) == [-0.1]
    assert logprobs["text_offset"][:3] == [0, 2, 6]


def test_prompt_logprobs_have_the_vllm_format(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    tokenizer = stack.models.find("m", "Completions").preprocessor.tokenizer
    first, second = tokenizer.encode("Hi you")
    rows = [
        None,
        {
            str(second): {"logprob": -0.5, "rank": 4},
            "5": {"logprob": -0.1, "rank": 1},
            "6": {"logprob": -0.2, "rank": 2},
        },
    ]
    shown = {
        str(second): {"logprob": -0.5, "rank": 4, "decoded_token": " you"},
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": tokenizer.decode([5])},
    }
    script = Script(["there"], engine_data={"prompt_logprobs": rows})
    choice = stacks.run(stack.complete(script, prompt=[first, second], prompt_logprobs=1)).json["choices"][0]
    assert choice["prompt_logprobs"] == [None, shown]
    assert choice["logprobs"] is None
    assert stack.engine.requests[-1].output_options.prompt_logprobs == 1
    token_data = {"nvext": {"token_data": [first, second]}, "prompt_logprobs": 1}
    answer = stacks.run(stack.chat(Script(["Hello"], engine_data={"prompt_logprobs": rows}), **token_data)).json
    assert answer["prompt_logprobs"] == [None, shown]
    assert "prompt_logprobs" not in stacks.run(stack.chat(Script(["Hello"]))).json


def test_prompt_logprobs_cover_only_the_original_prompt(stacks: ScriptedStackPool) -> None:
    rows = [None, {"5": {"logprob": float("-inf"), "rank": 1}}, {"6": {"logprob": -1, "rank": 1}}]
    script = Script(["there"], engine_data={"prompt_logprobs": rows})
    choice = stacks.run(stacks.plain.complete(script, prompt=[7, 5], prompt_logprobs=0)).json["choices"][0]
    assert len(choice["prompt_logprobs"]) == 2
    assert choice["prompt_logprobs"][1]["5"]["logprob"] == -9999.0


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_prompt_logprobs_that_no_worker_reports_are_refused(stacks: ScriptedStackPool, endpoint: str) -> None:
    answer = stacks.run(getattr(stacks.plain, endpoint)(Script(["there"]), prompt_logprobs=1))
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_logprobs")


def test_prompt_logprobs_can_be_streamed_only_in_nvext(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    answer = stacks.run(stack.complete(Script(["there"]), prompt_logprobs=1, stream=True))
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_logprobs")
    script = Script(["there"], engine_data={"prompt_logprobs": [None]})
    requested = {"prompt_logprobs": 1, "stream": True, "nvext": {"extra_fields": ["prompt_logprobs"]}}
    events = stacks.run(stack.complete(script, **requested)).events
    assert any(event.get("nvext", {}).get("prompt_logprobs") == [None] for event in events)


def test_echo_without_output_tokens_returns_the_prompt_and_its_logprobs(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    tokenizer = stack.models.find("m", "Completions").preprocessor.tokenizer
    _, second = tokenizer.encode("Hi you")
    rows = [None, {str(second): {"logprob": -0.5, "rank": 1}}]
    script = Script(["there", "here"], engine_data={"prompt_logprobs": rows})
    options = {"prompt": "Hi you", "echo": True, "logprobs": 1, "max_tokens": 0, "stop": "H", "min_tokens": 5}
    body = stacks.run(stack.complete(script, n=2, **options)).json
    assert [choice["text"] for choice in body["choices"]] == ["Hi you", "Hi you"]
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["Hi", " you"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 0)
    requested = stack.engine.requests[-1].stop_conditions
    assert (requested.max_tokens, requested.min_tokens) == (1, None)


def test_echo_without_output_tokens_is_streamed(stacks: ScriptedStackPool) -> None:
    answer = stacks.run(stacks.plain.complete(Script(["there"]), prompt="Hi you", echo=True, max_tokens=0, stream=True))
    assert "".join(choice["text"] for event in answer.events for choice in event["choices"]) == "Hi you"
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"


def test_echo_in_many_choices_is_bounded(stacks: ScriptedStackPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_choices, "request_bounds", lambda: RequestBounds(text_chars=100))
    script = Script(["there"])
    allowed = stacks.run(stacks.plain.complete(script, prompt="Hi you", echo=True, n=16))
    assert all(one["text"].startswith("Hi you") for one in allowed.json["choices"])
    refused = stacks.run(stacks.plain.complete(script, prompt="Hi you", echo=True, n=17))
    assert refused.status == 400
    assert "echo has 102 characters in all choices; at most 100 are allowed" in refused.json["error"]["message"]


def test_max_tokens_zero_without_echo_is_refused(stacks: ScriptedStackPool) -> None:
    for requested in ({}, {"echo": False}):
        answer = stacks.run(stacks.plain.complete(Script(["x"]), max_tokens=0, **requested))
        assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")
    answer = stacks.run(stacks.plain.chat(Script(["x"]), max_tokens=0))
    assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")


def test_echo_with_logprobs_requires_a_worker_that_reports_prompt_logprobs(stacks: ScriptedStackPool) -> None:
    answer = stacks.run(stacks.plain.complete(Script(["there"]), echo=True, logprobs=1))
    assert (answer.status, answer.json["error"]["param"]) == (400, "echo")


def test_no_stop_trim_keeps_the_stop_string(stacks: ScriptedStackPool) -> None:
    script = Script(["one, two, three"])
    kept = stacks.run(stacks.plain.complete(script, stop=" two", no_stop_trim=True)).json["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == ("one, two", "stop")


# ---- worker requests ------------------------------------------------------------------------------------------------


def test_headers_reach_the_worker(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    headers = {"x-tenant-id": "ten", "x-dynamo-session-id": "s", "x-dynamo-request-priority": "3"}
    stacks.run(stack.chat(Script(["x"]), headers, cache_salt="mine"))
    requested = stack.engine.requests[-1]
    assert requested.routing is not None
    assert (requested.routing.cache_salt, requested.routing.priority, requested.routing.priority_jump) == (
        "ten",
        3,
        3.0,
    )
    assert requested.agent_context == {"session_id": "s", "input_trigger": "user_message"}
    assert requested.image_cache_scope == "s"
    assert isinstance(requested.extra_args, dict)
    assert requested.extra_args["nvext"] == {"cache_salt": "ten"}


def test_prompt_cache_key_is_the_session_id_without_a_session_header(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    stacks.run(stack.chat(Script(["x"]), prompt_cache_key="k"))
    assert stack.engine.requests[-1].agent_context == {
        "session_id": "prompt_cache_key:k",
        "input_trigger": "user_message",
    }
    stacks.run(stack.chat(Script(["x"]), {"x-dynamo-session-id": "s"}, prompt_cache_key="k"))
    assert stack.engine.requests[-1].agent_context["session_id"] == "s"  # type: ignore[index]


def test_disabled_nvext_ignores_extensions_except_the_cache_salt(
    stacks: ScriptedStackPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISABLE_FRONTEND_NVEXT", "1")
    stack = stacks.open()
    headers = {"x-dynamo-request-priority": "3"}
    answer = stacks.run(stack.chat(None, headers, nvext={"cache_salt": "a", "extra_fields": ["timing"]}))
    assert "nvext" not in answer.json
    requested = stack.engine.requests[-1]
    assert requested.routing is not None
    assert (requested.routing.cache_salt, requested.routing.priority) == ("a", None)


@pytest.mark.parametrize("headers", [{"x-dynamo-worker-instance-id": "5"}, {}])
def test_nonexistent_worker_instance_is_refused(stacks: ScriptedStackPool, headers: dict[str, str]) -> None:
    stack = stacks.plain
    nvext = {} if headers else {"backend_instance_id": 5}
    answer = stacks.run(stack.chat(Script(["x"]), headers, nvext=nvext))
    assert (answer.status, answer.json["error"]["param"]) == (400, "nvext.backend_instance_id")
    (worker,) = stack.models.find("m", "Chat").worker_ids()
    assert stacks.run(stack.chat(Script(["x"]), {"x-worker-instance-id": str(worker)})).status == 200


def test_media_reach_the_worker(stacks: ScriptedStackPool) -> None:
    stack = stacks.plain
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    content = [{"type": "text", "text": "what?"}, part]
    stacks.run(stack.chat(Script(["x"]), messages=[{"role": "user", "content": content}], media_io_kwargs={"a": 1}))
    requested = stack.engine.requests[-1]
    assert requested.multi_modal_data == {"image_url": [{"Url": "https://example.com/a.png"}]}
    assert requested.media_io_kwargs == {"a": 1}
    assert isinstance(requested.extra_args, dict)
    assert requested.extra_args["messages"] == [{"role": "user", "content": content}]
    assert "what?" in requested.extra_args["formatted_prompt"]


def test_thinking_budget_is_sent_to_the_worker(stacks: ScriptedStackPool) -> None:
    stack = stacks.parsed
    stacks.run(stack.chat(Script(["x"]), thinking=True, thinking_token_budget=5, nvext={"max_thinking_tokens": 9}))
    requested = stack.engine.requests[-1]
    assert (requested.stop_conditions.max_thinking_tokens, requested.require_reasoning) == (5, True)
    assert isinstance(requested.extra_args, dict)
    assert requested.extra_args["reasoning_parser_kwargs"]["chat_template_kwargs"]["enable_thinking"] is True
    stacks.run(stack.chat(Script(["x"]), nvext={"max_thinking_tokens": 9}))
    requested = stack.engine.requests[-1]
    assert requested.stop_conditions.max_thinking_tokens == 9
    assert requested.require_reasoning is not True, "the prompt itself has closed the thoughts"


# ---- the end ---------------------------------------------------------------------------------------------------------


class Nothing:
    """Models of which there are none."""

    def find(self, name: str, kind: str, access: Any = None) -> Any:
        raise NotFound(name)


class Client:
    """Exchange that records its response."""

    body = b'{"model": "m", "prompt": "Hi"}'
    headers = ((b"x-request-id", b"mine"),)
    account = None
    error_body = None

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def drop_body(self) -> None:
        self.body = b""

    def refuse(self, error: Any) -> None:
        self.statuses.append(error.status)


def make() -> Pipeline:
    return Pipeline(Nothing(), FrontendMetrics(MetricsRegistry()))  # type: ignore[arg-type]


async def test_request_received_in_the_tick_of_the_drain_is_answered() -> None:
    pipeline, client = make(), Client()
    pipeline.handle_completion(client)  # type: ignore[arg-type]
    await pipeline.drain(1.0)
    assert client.statuses == [404]


async def test_request_during_the_drain_is_refused() -> None:
    pipeline, client = make(), Client()
    await pipeline.drain(1.0)
    pipeline.handle_completion(client)  # type: ignore[arg-type]
    assert client.statuses == [503]


async def test_request_beyond_the_time_limit_is_failed() -> None:
    pipeline, failed = make(), list[Exception]()
    now_s = time.perf_counter()
    answers = [SimpleNamespace(state=SimpleNamespace(started_s=now_s - ago_s), fail=failed.append) for ago_s in (5, 20)]
    pipeline._answers = answers  # type: ignore[assignment]
    pipeline.expire(10.0)
    assert [str(error) for error in failed] == ["no end after 10 s"]


@pytest.mark.parametrize(
    ("request_type", "written_ago_s", "comments"), [("stream", 2.0, 1), ("stream", 0.5, 0), ("unary", 2.0, 0)]
)
async def test_idle_stream_receives_one_comment_per_interval(
    request_type: str, written_ago_s: float, comments: int
) -> None:
    pipeline, written = make(), list[str]()
    last_s = time.perf_counter() - written_ago_s
    state = RequestState(pipeline.metrics, "chat_completions", "m", stream=request_type == "stream", started_s=0.0)
    state.written(last_s)
    answer = SimpleNamespace(state=state, exchange=SimpleNamespace(comment=lambda: written.append("comment")))
    pipeline._answers = [answer]  # type: ignore[assignment,list-item]
    pipeline.keep_alive(1.0)
    pipeline.keep_alive(1.0)
    assert written == ["comment"] * comments


@pytest.mark.parametrize(
    ("request_type", "sent_ago_s", "has_token", "begins"),
    [
        ("stream", 2.0, False, 1),
        ("stream", 0.5, False, 0),
        ("stream", None, False, 0),
        ("stream", 2.0, True, 0),
        ("unary", 2.0, False, 0),
    ],
)
async def test_stream_without_output_sends_its_status_after_the_commit_delay(
    request_type: str, sent_ago_s: float | None, has_token: bool, begins: int
) -> None:
    pipeline, begun = make(), list[str]()
    state = RequestState(pipeline.metrics, "chat_completions", "m", stream=request_type == "stream", started_s=0.0)
    if sent_ago_s is not None:
        state.sent_s = time.perf_counter() - sent_ago_s
    if has_token:
        state.written(time.perf_counter())
    answer = SimpleNamespace(state=state, exchange=SimpleNamespace(begin=lambda: begun.append("begin")))
    pipeline._answers = [answer]  # type: ignore[assignment,list-item]
    pipeline.commit(1.0)
    assert begun == ["begin"] * begins


def test_prompts_of_a_large_batch_are_sent_over_several_turns_of_the_loop() -> None:
    assert turns_of([100] * 5) == [0] * 5
    assert turns_of([8192] * 5) == [0, 0, 1, 1, 2]
    assert turns_of([1_000_000]) == [0]
    assert turns_of([1_000_000, 1]) == [0, 61]
