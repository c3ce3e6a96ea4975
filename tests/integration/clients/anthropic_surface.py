"""Anthropic's Python client: the supported part of its API, with its strict validation on."""

import asyncio
import sys
from typing import Any

import anthropic
from surface import (
    CALLED,
    CALLING_TWICE,
    DEMO,
    GOOD_KEY,
    GREETING,
    MESSAGES,
    MODEL,
    NARROW_KEY,
    PARAMETERS,
    PICTURE,
    THOUGHT,
    USER,
    FailsLater,
    check,
    fails,
    main,
    places,
    raises,
    says,
)

URL, KEYED_URL, SLOW_KEY = places()
OPTIONS: Any = {"max_retries": 0, "timeout": 60.0, "_strict_response_validation": True}
client = anthropic.Anthropic(base_url=URL, api_key="none", **OPTIONS)
WEATHER: Any = {"name": "get_weather", "description": "The weather of a city.", "input_schema": PARAMETERS}


def send_request(**fields: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 1000, "messages": USER, **fields})


def blocks(message: Any) -> list[Any]:
    """Return the content without the ids."""
    return [
        {name: value for name, value in block.to_dict().items() if name not in ("id", "parsed_output") and value is not None}
        for block in message.content
    ]  # fmt: skip


@check
def message_completes() -> None:
    message = send_request(
        system="Be brief.", metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    )
    assert blocks(message) == [{"type": "text", "text": GREETING}]
    assert (message.type, message.role, message.stop_reason, message.model) == (
        "message",
        "assistant",
        "end_turn",
        MODEL,
    )
    assert message.id.startswith("msg_") and message._request_id.startswith("req_")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


@check
def all_content_blocks_are_accepted() -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12 degrees"}]},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert send_request(messages=messages, system=system, tools=[WEATHER]).content[0].text == GREETING


@check
def thinking_text_and_tool_use_unary_and_streamed() -> None:
    for cuts in ([], [1], [3, 1, 7]):
        options: Any = {"max_tokens": 1000, "tools": [WEATHER], "extra_body": says(CALLING_TWICE, cuts=cuts)}
        whole = send_request(**options)
        with client.messages.stream(model=MODEL, messages=USER, **options) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"text", "thinking", "input_json", "signature", "content_block_stop", "message_stop"} <= kinds
        assert blocks(final) == blocks(whole) and final.usage == whole.usage
        thought, output, call, other = whole.content
        assert (thought.thinking, output.text, call.input) == (THOUGHT, MESSAGES, CALLED)
        assert whole.stop_reason == "tool_use" and call.id != other.id


@check
def stream_events_are_in_order() -> None:
    kinds = [event.type for event in send_request(stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(model=MODEL, max_tokens=9, messages=USER) as stream:
        assert "".join(stream.text_stream) == GREETING


@check
def response_can_be_resent() -> None:
    first = send_request(tools=[WEATHER], extra_body=says(CALLING_TWICE))
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    output: Any = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert send_request(messages=output, tools=[WEATHER]).content[0].text == GREETING


@check
def finish_reasons_of_limit_and_stop() -> None:
    assert send_request(max_tokens=1, extra_body=says("one two")).stop_reason == "max_tokens"
    message = send_request(stop_sequences=[" two"], extra_body=says("one two three"))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", " two", "one")


@check
def tool_choice_forces_a_tool() -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    message = send_request(
        model=DEMO, max_tokens=400, tools=[WEATHER], tool_choice=choice, extra_body={"temperature": 0}
    )
    assert message.content[-1].type == "tool_use" and message.content[-1].name == "get_weather"


@check
def count_tokens() -> None:
    fields: Any = {"messages": USER, "system": "Be brief.", "tools": [WEATHER]}
    assert client.messages.count_tokens(model=MODEL, **fields).input_tokens == send_request(**fields).usage.input_tokens


@check
def image_is_passed_to_the_worker() -> None:
    shown: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": PICTURE}}]}]
    assert send_request(messages=shown).content[0].text == GREETING
    assert "image_url" in raises(anthropic.BadRequestError, lambda: send_request(model=DEMO, messages=shown)).message


@check
def models_are_listed() -> None:
    assert {MODEL, DEMO} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(DEMO).type == "model"
    raises(anthropic.NotFoundError, lambda: client.models.retrieve("no-such-model"))


@check
async def concurrent_requests_complete() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", **OPTIONS) as asker:

        async def one(number: int) -> str:
            output = says(f"I am {number}")
            options: Any = {"model": MODEL, "max_tokens": 20, "messages": USER, "extra_body": output}
            async with asker.messages.stream(**options) as stream:
                return "".join([text async for text in stream.text_stream])

        assert await asyncio.gather(*map(one, range(20))) == [f"I am {number}" for number in range(20)]


@check
def errors_have_the_client_types() -> None:
    error = raises(anthropic.BadRequestError, lambda: send_request(extra_body={"temperature": 3}))
    assert error.body["type"] == "error" and error.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in error.message.lower()
    assert "bogus" in raises(anthropic.BadRequestError, lambda: send_request(extra_body={"bogus": 1})).message
    assert "no-such-model" in raises(anthropic.NotFoundError, lambda: send_request(model="no-such-model")).message
    error = raises(anthropic.InternalServerError, lambda: send_request(extra_body=fails("Unknown")))
    assert error.body["error"]["type"] == "api_error" and "script" not in error.message
    error = raises(anthropic.OverloadedError, lambda: send_request(extra_body=fails("WorkerOverloaded")))
    assert error.status_code == 529 and error.body["error"]["type"] == "overloaded_error"
    raises(anthropic.InternalServerError, lambda: send_request(stream=True, extra_body=fails("Unknown")))


@check
def error_in_a_stream_is_raised() -> None:
    late = FailsLater()
    stream = send_request(stream=True, extra_body=late.body)
    error = raises(anthropic.APIStatusError, lambda: late.read(stream))
    assert error.body["error"]["type"] == "api_error"


@check
def unauthorized_keys_are_refused() -> None:
    def of(key: str) -> Any:
        asker = anthropic.Anthropic(base_url=KEYED_URL, api_key=key, **OPTIONS)
        return asker.messages.create(model=MODEL, max_tokens=9, messages=USER)

    assert of(GOOD_KEY).content[0].text == GREETING
    error = raises(anthropic.AuthenticationError, lambda: of("key-wrong"))
    assert error.body["error"]["type"] == "authentication_error"
    error = raises(anthropic.PermissionDeniedError, lambda: of(NARROW_KEY))
    assert error.body["error"]["type"] == "permission_error"
    of(SLOW_KEY)
    error = raises(anthropic.RateLimitError, lambda: of(SLOW_KEY))
    assert error.body["error"]["type"] == "rate_limit_error" and int(error.response.headers["retry-after"]) > 0


if __name__ == "__main__":
    print(f"anthropic {anthropic.__version__} on Python {sys.version.split()[0]}", flush=True)
    main()
