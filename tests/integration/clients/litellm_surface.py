"""LiteLLM's client: OpenAI and Anthropic routes behind its one interface."""

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise the first import downloads a file.

import litellm
import pydantic
from surface import (
    CALLED,
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
litellm.suppress_debug_info = True


class Place(pydantic.BaseModel):
    """Structured output of a place."""

    city: str = pydantic.Field(max_length=12)
    is_large: bool


def send_request(model: str = MODEL, url: str = URL, key: str = "none", **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}", api_base=f"{url}/v1", api_key=key, num_retries=0, max_retries=0, timeout=60,
        **{"messages": USER, **fields},
    )  # fmt: skip


def message(model: str = MODEL, **fields: Any) -> Any:
    """Send the same through `/v1/messages`."""
    return litellm.completion(
        model=f"anthropic/{model}", api_base=URL, api_key="none", max_tokens=500, max_retries=0, timeout=60,
        **{"messages": USER, **fields},
    )  # fmt: skip


@check
def chat_completes() -> None:
    answer = send_request(temperature=0.1, top_p=0.9, seed=7)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (GREETING, "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@check
def stream_equals_unary_response() -> None:
    chunks = list(send_request(stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole and whole.choices[0].message.content == GREETING  # type: ignore[union-attr]
    assert whole.usage.completion_tokens == send_request().usage.completion_tokens  # type: ignore[attr-defined]


@check
def tool_calls_and_reasoning_unary_and_streamed() -> None:
    for cuts in ([], [1]):
        options: Any = {"tools": [WEATHER], "extra_body": says(CALLING_TWICE, cuts=cuts)}
        answer = send_request(**options).choices[0].message
        assert (answer.content, answer.reasoning_content) == (MESSAGES, THOUGHT)
        assert json.loads(answer.tool_calls[0].function.arguments) == CALLED
        whole: Any = litellm.stream_chunk_builder(list(send_request(stream=True, **options)))
        assert [one.function.arguments for one in whole.choices[0].message.tool_calls] == [
            one.function.arguments for one in answer.tool_calls
        ]


@check
def structured_output() -> None:
    answer = send_request(DEMO, response_format=Place, temperature=0, max_tokens=200)
    assert Place.model_validate_json(answer.choices[0].message.content)


@check
def logprobs_and_several_choices() -> None:
    answer = send_request(logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert [one.message.content for one in send_request(n=2, extra_body=says("one", "two")).choices] == ["one", "two"]


@check
def image_is_passed_to_the_worker() -> None:
    shown: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]
    assert send_request(messages=shown).choices[0].message.content == GREETING
    raises(litellm.BadRequestError, lambda: send_request(DEMO, messages=shown))


@check
async def concurrent_requests_complete() -> None:
    async def one(number: int) -> str:
        answer: Any = await litellm.acompletion(
            model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", messages=USER, stream=True,
            extra_body=says(f"I am {number}"),
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    assert await asyncio.gather(*map(one, range(10))) == [f"I am {number}" for number in range(10)]


@check
def completions_and_embeddings() -> None:
    where: Any = {"api_base": f"{URL}/v1", "api_key": "none"}
    answer: Any = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", **where)
    assert answer.choices[0].text == GREETING
    vectors = litellm.embedding(model=f"openai/{EMBEDDER}", input=["one", "two"], encoding_format="float", **where)
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 0  # type: ignore[arg-type,index]


@check
def responses_unary_and_streamed() -> None:
    where: Any = {"model": f"openai/{MODEL}", "input": "hi", "api_base": f"{URL}/v1", "api_key": "none"}
    answer: Any = litellm.responses(**where)
    assert answer.output[-1].content[0].text == GREETING
    kinds = [str(getattr(event.type, "value", event.type)) for event in litellm.responses(stream=True, **where)]  # type: ignore[union-attr]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@check
def messages_complete() -> None:
    answer = message(temperature=0.1)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (GREETING, "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in message(stream=True)) == GREETING
    called = message(tools=[WEATHER], **says(CALLING_TWICE)).choices[0].message
    assert (called.content, json.loads(called.tool_calls[0].function.arguments)) == (MESSAGES, CALLED)


@check
def errors_have_the_client_types() -> None:
    raises(litellm.BadRequestError, lambda: send_request(temperature=3))
    raises(litellm.NotFoundError, lambda: send_request("no-such-model"))
    raises(litellm.InternalServerError, lambda: send_request(extra_body=fails("Unknown")))
    raises(litellm.BadRequestError, lambda: message(temperature=3))
    raises(litellm.NotFoundError, lambda: message("no-such-model"))
    late = FailsLater()
    stream = send_request(stream=True, extra_body=late.body)
    error = raises(litellm.exceptions.MidStreamFallbackError, lambda: late.read(stream))
    assert "Internal server error" in str(error)


@check
def unauthorized_keys_are_refused() -> None:
    assert send_request(url=KEYED_URL, key=GOOD_KEY).choices[0].message.content == GREETING
    raises(litellm.AuthenticationError, lambda: send_request(url=KEYED_URL, key="key-wrong"))
    error = raises(
        litellm.APIError, lambda: send_request(url=KEYED_URL, key=NARROW_KEY)
    )  # LiteLLM has no class for 403.
    assert error.status_code == 403
    send_request(url=KEYED_URL, key=SLOW_KEY)
    raises(litellm.RateLimitError, lambda: send_request(url=KEYED_URL, key=SLOW_KEY))


if __name__ == "__main__":
    print(f"litellm {version('litellm')} on Python {sys.version.split()[0]}", flush=True)
    main()
