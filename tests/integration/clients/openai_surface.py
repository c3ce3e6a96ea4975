"""OpenAI's Python client, 2.x and 3.x: the supported part of its API, with its strict validation on."""

import asyncio
import json
import socket
import sys
import time
from typing import Any

import openai
import pydantic
from surface import (
    CALLED,
    CALLING,
    CALLING_TWICE,
    DEMO,
    EMBEDDER,
    GOOD_KEY,
    GREETING,
    MESSAGES,
    MODEL,
    NARROW_KEY,
    PICTURE,
    THOUGHT,
    USER,
    WEATHER,
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
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", **OPTIONS)
lenient = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60.0)
"""For the two responses of OpenAI's own service that its client's strict validation rejects."""
chats = client.chat.completions
STRICT = {**WEATHER["function"]["parameters"], "additionalProperties": False}
RESPONSE_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": STRICT, "strict": True}


class Place(pydantic.BaseModel):
    """Structured output of a place."""

    city: str = pydantic.Field(max_length=12)
    is_large: bool


def send_request(**fields: Any) -> Any:
    return chats.create(**{"model": MODEL, "messages": USER, **fields})


# Chat ------------------------------------------------------------------------------------------------------------------


@check
def chat_completes() -> None:
    answer = send_request(user="someone", metadata={"a": "b"}, store=False, seed=7, service_tier="auto")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (GREETING, "assistant", "stop")
    assert choice.message.refusal is None and choice.message.tool_calls is None
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@check
def stream_equals_unary_response() -> None:
    chunks = list(send_request(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == GREETING
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == send_request().usage
    assert {one.id for one in chunks} == {chunks[0].id}


@check
def stream_without_usage_option_has_no_usage() -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in send_request(stream=True))


@check
def all_message_roles_are_accepted() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "anna"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12 degrees"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "and?"},
    ]
    assert send_request(messages=messages, tools=[WEATHER]).choices[0].message.content == GREETING


@check
def parsed_response_can_be_resent() -> None:
    first = send_request(tools=[WEATHER], extra_body=says(CALLING)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 degrees"}
    assert send_request(messages=[*USER, first, result], tools=[WEATHER]).choices[0].message.content == GREETING


@check
def tool_calls_and_reasoning_unary_and_streamed() -> None:
    for cuts in ([], [1], [3, 1, 7]):
        options: Any = {"tools": [WEATHER], "extra_body": says(CALLING_TWICE, cuts=cuts)}
        (choice,) = send_request(**options).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == MESSAGES and choice.message.reasoning_content == THOUGHT
        first, second = choice.message.tool_calls
        assert json.loads(first.function.arguments) == CALLED and first.id != second.id
        with chats.stream(model=MODEL, messages=USER, **options) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"content.delta", "content.done", "tool_calls.function.arguments.delta"} <= kinds
        (streamed,) = final.choices
        assert streamed.message.content == MESSAGES
        assert [one.function.arguments for one in streamed.message.tool_calls] == [
            one.function.arguments for one in choice.message.tool_calls
        ]


@check
def tool_choice_none_required_and_named() -> None:
    tools: Any = {"model": DEMO, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    assert send_request(**tools, tool_choice="none").choices[0].message.tool_calls is None
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        (answer,) = send_request(**{**tools, "max_tokens": 400}, tool_choice=choice).choices
        assert answer.message.tool_calls[0].function.name == "get_weather"
        if answer.finish_reason != "length":
            assert "city" in json.loads(answer.message.tool_calls[0].function.arguments)


@check
def parsed_response_has_the_model_type() -> None:
    answer = chats.parse(
        model=DEMO, messages=[{"role": "user", "content": "A place, please."}], response_format=Place,
        temperature=0, max_tokens=200,
    )  # fmt: skip
    place = answer.choices[0].message.parsed
    assert isinstance(place, Place) and json.loads(answer.choices[0].message.content or "") == place.model_dump()
    with chats.stream(model=DEMO, messages=USER, response_format=Place, temperature=0, max_tokens=200) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)


@check
def tool_arguments_are_parsed() -> None:
    tool = openai.pydantic_function_tool(Place, name="get_weather")
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "is_large": true}}\n</tool_call>'
    answer = chats.parse(model=MODEL, messages=USER, tools=[tool], extra_body=says(text))
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Place(city="Oslo", is_large=True)


@check
def json_object_format() -> None:
    answer = send_request(model=DEMO, response_format={"type": "json_object"}, max_tokens=200, temperature=0)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check
def logprobs_include_bytes() -> None:
    (choice,) = send_request(logprobs=True, top_logprobs=2, extra_body=says("€ 😀 ok")).choices
    content = choice.logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == "€ 😀 ok"
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in content)
    streamed = [
        one
        for chunk in send_request(logprobs=True, top_logprobs=2, stream=True, extra_body=says("€ 😀 ok"))
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or ()
    ]
    assert streamed == content


@check
def several_choices_have_indexes() -> None:
    texts = ("one", "two and", "three and more")
    answer = send_request(n=3, extra_body=says(*texts))
    assert [(one.index, one.message.content) for one in answer.choices] == list(enumerate(texts))
    found = ["", "", ""]
    for chunk in send_request(n=3, stream=True, extra_body=says(*texts)):
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    assert tuple(found) == texts


@check
def finish_reasons_of_limit_and_stop() -> None:
    (choice,) = send_request(max_completion_tokens=1, extra_body=says("one two three")).choices
    assert (choice.finish_reason, choice.message.content) == ("length", "one")
    (choice,) = send_request(stop=[" two"], extra_body=says("one two three")).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "one")


@check
def usage_counts_cached_and_reasoning_tokens() -> None:
    usage = send_request(extra_body=says(CALLING, cached=5), tools=[WEATHER]).usage
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert usage.completion_tokens_details.reasoning_tokens > 0


@check
def image_is_passed_to_the_worker() -> None:
    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    shown: Any = [{"role": "user", "content": parts}]
    assert send_request(messages=shown).choices[0].message.content == GREETING
    error = raises(openai.BadRequestError, lambda: send_request(model=DEMO, messages=shown))
    assert error.param == "messages" and "image_url" in error.message


# Completions, embeddings, models ---------------------------------------------------------------------------------------


@check
def completions() -> None:
    complete = client.completions.create
    answer = complete(model=MODEL, prompt="Once", max_tokens=9)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.object) == (
        GREETING, "stop", "text_completion",
    )  # fmt: skip
    chunks = list(  # Their `finish_reason` is null until the last.
        lenient.completions.create(model=MODEL, prompt="Once", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(one.choices[0].text for one in chunks if one.choices) == GREETING
    assert chunks[-1].usage == answer.usage
    assert [one.index for one in complete(model=MODEL, prompt=["a", "b", "c"]).choices] == [0, 1, 2]
    assert complete(model=MODEL, prompt=[[1, 2], [3]]).choices[1].text == GREETING
    assert complete(model=MODEL, prompt="Once", echo=True).choices[0].text == "Once" + GREETING
    logprobs = complete(model=MODEL, prompt="Once", logprobs=2).choices[0].logprobs
    assert logprobs and "".join(logprobs.tokens or ()) == GREETING
    assert complete(model=DEMO, prompt="Once", n=2, best_of=3, max_tokens=4, temperature=1).choices[1].text


@check
def embeddings() -> None:
    embed = client.embeddings.create
    # Base64, which the client decodes after its validation.
    packed = lenient.embeddings.create(model=EMBEDDER, input="one")
    plain = embed(model=EMBEDDER, input="one", encoding_format="float")
    first, second = packed.data[0].embedding, plain.data[0].embedding
    assert len(first) == len(second) > 0
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) < 1e-6
    several = lenient.embeddings.create(model=EMBEDDER, input=["one", "two"])
    assert [one.index for one in several.data] == [0, 1] and several.usage.prompt_tokens > 0
    assert len(embed(model=EMBEDDER, input=[[1, 2, 3], [4]], encoding_format="float").data) == 2
    fewer = embed(model=EMBEDDER, input="one", dimensions=16, encoding_format="float")
    assert len(fewer.data[0].embedding) == 16


@check
def models_are_listed() -> None:
    assert {MODEL, DEMO, EMBEDDER} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(DEMO).object == "model"
    assert raises(openai.NotFoundError, lambda: client.models.retrieve("no-such-model")).code == "model_not_found"


# Responses -------------------------------------------------------------------------------------------------------------


@check
def responses_are_stored_and_continued() -> None:
    responses = client.responses
    first = responses.create(model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert (first.output_text, first.status) == (GREETING, "completed")
    second = responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    assert second.usage and first.usage and second.usage.input_tokens > 0
    assert responses.retrieve(first.id).output_text == GREETING
    assert [item.type for item in responses.input_items.list(first.id)] == ["message"]
    assert responses.input_tokens.count(model=MODEL, input="hi").input_tokens > 0
    responses.delete(first.id)
    assert raises(openai.NotFoundError, lambda: responses.retrieve(first.id)).code == "response_not_found"


@check
def responses_stream_and_parse() -> None:
    options: Any = {"model": MODEL, "input": "hi", "tools": [RESPONSE_TOOL], "extra_body": says(CALLING)}
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[-1].arguments) == CALLED
    parsed = client.responses.parse(
        model=DEMO, input="A place.", text_format=Place, max_output_tokens=200, temperature=0
    )
    assert isinstance(parsed.output_parsed, Place)


# Files and batches -----------------------------------------------------------------------------------------------------


@check
def batch_file_completes() -> None:
    def line(name: str) -> str:
        body = {"model": MODEL, "messages": USER, **says(name)}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    names = ("one", "two", "three")
    data = "\n".join(map(line, names)).encode()
    file = client.files.create(file=("questions.jsonl", data), purpose="batch")
    assert (file.object, file.bytes, file.filename) == ("file", len(data), "questions.jsonl")
    assert client.files.retrieve(file.id) == file and client.files.content(file.id).content == data
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    deadline = time.monotonic() + 60
    while client.batches.retrieve(batch.id).status != "completed":
        assert time.monotonic() < deadline, client.batches.retrieve(batch.id)
        time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts and (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    assert batch.id in [one.id for one in client.batches.list()]
    answers = [json.loads(one) for one in client.files.content(batch.output_file_id or "").text.splitlines()]
    printed = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers}
    assert printed == {name: name for name in names}
    assert client.files.delete(file.id).deleted
    raises(openai.NotFoundError, lambda: client.files.retrieve(file.id))
    raises(openai.NotFoundError, lambda: client.batches.retrieve("batch_unknown"))


# Request options
# -------------------------------------------------------------------------------------------------------


@check
def raw_response_has_headers() -> None:
    raw = chats.with_raw_response.create(model=MODEL, messages=USER, extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine" and raw.request_id == "mine"
    assert raw.parse().choices[0].message.content == GREETING
    with chats.with_streaming_response.create(model=MODEL, messages=USER) as streaming:
        assert GREETING in "".join(streaming.iter_lines())


@check
async def concurrent_requests_complete() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", **OPTIONS) as asker:

        async def one(number: int) -> str:
            printed = says(f"I am {number}")
            stream = await asker.chat.completions.create(model=MODEL, messages=USER, stream=True, extra_body=printed)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*map(one, range(20))) == [f"I am {number}" for number in range(20)]
        assert (await asker.responses.create(model=MODEL, input="hi")).output_text == GREETING
        assert len([model async for model in asker.models.list()]) >= 3


@check
def stream_can_be_closed_early() -> None:
    stream = send_request(stream=True, extra_body=says("many words " * 100))
    next(iter(stream))
    stream.close()
    assert send_request().choices[0].message.content == GREETING


# Errors ----------------------------------------------------------------------------------------------------------------


@check
def errors_have_the_client_types() -> None:
    error = raises(openai.BadRequestError, lambda: send_request(temperature=3))
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert "Temperature" in error.message
    assert raises(openai.BadRequestError, lambda: send_request(extra_body={"bogus": 1})).param == "bogus"
    assert raises(openai.NotFoundError, lambda: send_request(model="no-such-model")).param == "model"
    assert raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x")).param == "model"
    raises(openai.NotFoundError, lambda: client.moderations.create(model=MODEL, input="x"))
    raises(openai.NotFoundError, lambda: client.images.generate(model=MODEL, prompt="x"))
    raises(openai.NotFoundError, lambda: client.audio.speech.create(model=MODEL, input="x", voice="alloy"))
    error = raises(openai.InternalServerError, lambda: send_request(extra_body=fails("Unknown")))
    assert error.status_code == 500 and "script" not in error.message
    error = raises(openai.InternalServerError, lambda: send_request(extra_body=fails("WorkerOverloaded")))
    assert error.status_code == 529 and error.response.headers["retry-after"]
    assert raises(openai.BadRequestError, lambda: send_request(extra_body=fails("InvalidArgument"))).status_code == 400


@check
def error_before_the_first_token_has_its_status() -> None:
    raises(openai.InternalServerError, lambda: send_request(stream=True, extra_body=fails("Unknown")))


@check
def error_in_a_stream_is_raised() -> None:
    late = FailsLater()
    stream = send_request(stream=True, extra_body=late.body)
    error = raises(openai.APIError, lambda: late.read(stream))
    assert "Internal server error" in error.message


@check
def unauthorized_keys_are_refused() -> None:
    def of(key: str) -> Any:
        return openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=key, **OPTIONS).chat.completions

    question: Any = {"model": MODEL, "messages": USER}
    assert of(GOOD_KEY).create(**question).choices[0].message.content == GREETING
    error = raises(openai.AuthenticationError, lambda: of("key-wrong").create(**question))
    assert error.code == "invalid_api_key"
    raises(openai.PermissionDeniedError, lambda: of(NARROW_KEY).create(**question))
    of(SLOW_KEY).create(**question)
    error = raises(openai.RateLimitError, lambda: of(SLOW_KEY).create(**question))
    assert int(error.response.headers["retry-after"]) > 0


@check
def connection_errors_and_timeouts_differ() -> None:
    unreachable = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)
    raises(openai.APIConnectionError, unreachable.models.list)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        unreachable = openai.OpenAI(
            base_url=f"http://127.0.0.1:{silent.getsockname()[1]}/v1", api_key="none", max_retries=0
        )
        raises(openai.APITimeoutError, lambda: unreachable.models.list(timeout=0.2))


@check
def overload_is_retried() -> None:
    patient = client.with_options(max_retries=1)
    answers: list[int] = []
    patient._client.event_hooks["response"].append(lambda response: answers.append(response.status_code))
    body = fails("WorkerOverloaded")
    raises(
        openai.InternalServerError, lambda: patient.chat.completions.create(model=MODEL, messages=USER, extra_body=body)
    )
    patient._client.event_hooks["response"].clear()
    assert answers == [529, 529]


if __name__ == "__main__":
    print(f"openai {openai.__version__} on Python {sys.version.split()[0]}", flush=True)
    main()
