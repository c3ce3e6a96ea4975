"""LangChain's client: chats, tools, structured answers, embeddings, completions and responses, through its own classes."""

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import openai
import pydantic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
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
    FailsLater,
    check,
    fails,
    main,
    places,
    raises,
    says,
)

URL, KEYED_URL, SLOW_KEY = places()


class Place(pydantic.BaseModel):
    """Structured output of a place."""

    city: str = pydantic.Field(max_length=12)
    is_large: bool


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"12 degrees in {city}"


def chat(model: str = MODEL, url: str = URL, key: str = "none", **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, **options)  # type: ignore[arg-type]


@check
def chat_completes() -> None:
    answer = chat(seed=7, temperature=0.1, max_tokens=50).invoke([SystemMessage("Be brief."), HumanMessage("hi")])
    assert answer.content == GREETING and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata and answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0


@check
def stream_equals_unary_response() -> None:
    chunks = list(chat(stream_usage=True).stream("hi"))
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == GREETING and whole.usage_metadata and whole.usage_metadata["output_tokens"] > 0


@check
def tool_calls_are_run() -> None:
    for cuts in ([], [1]):
        model = chat(extra_body=says(CALLING_TWICE, cuts=cuts)).bind_tools([get_weather])
        answer = model.invoke("hi")
        assert answer.content == MESSAGES and [call["name"] for call in answer.tool_calls] == ["get_weather"] * 2
        assert answer.tool_calls[0]["args"] == CALLED
        pieces = list(model.stream("hi"))
        assert sum(pieces[1:], pieces[0]).tool_calls[1]["args"] == answer.tool_calls[1]["args"]
        results = [get_weather.invoke(call) for call in answer.tool_calls]
        assert all(isinstance(one, ToolMessage) for one in results)
        assert chat().bind_tools([get_weather]).invoke([HumanMessage("hi"), answer, *results]).content == GREETING


@check
def structured_output() -> None:
    model = chat(DEMO, temperature=0, max_tokens=300)
    for method in ("json_schema", "function_calling"):
        place = model.with_structured_output(Place, method=method).invoke("A place, please.")  # type: ignore[arg-type]
        assert isinstance(place, Place), method


@check
def logprobs_and_several_choices() -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke("hi")
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    result = chat(n=2, extra_body=says("one", "two")).generate([[HumanMessage("hi")]])
    assert [one.text for one in result.generations[0]] == ["one", "two"]


@check
def image_is_passed_to_the_worker() -> None:
    shown = [HumanMessage([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": PICTURE}}])]
    assert chat().invoke(shown).content == GREETING
    raises(openai.BadRequestError, lambda: chat(DEMO).invoke(shown))


@check
async def concurrent_requests_complete() -> None:
    assert [one.content for one in await chat().abatch(["hi"] * 10)] == [GREETING] * 10
    assert "".join([str(chunk.content) async for chunk in chat().astream("hi")]) == GREETING
    await asyncio.sleep(0)


@check
def embeddings() -> None:
    embedder = OpenAIEmbeddings(
        model=EMBEDDER, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False  # type: ignore[arg-type]
    )  # fmt: skip
    vectors = embedder.embed_documents(["one", "two"])
    assert len(vectors) == 2 and len(vectors[0]) == len(embedder.embed_query("one")) > 0


@check
def completions() -> None:
    model = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0)  # type: ignore[arg-type]
    assert model.invoke("Once") == GREETING
    assert "".join(model.stream("Once")) == GREETING


@check
def responses_are_continued() -> None:
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("hi")
    assert first.text == GREETING
    assert model.invoke([HumanMessage("hi"), first, HumanMessage("and?")]).text == GREETING
    assert "".join(str(chunk.text) for chunk in model.stream("hi")) == GREETING
    answer = chat(use_responses_api=True, extra_body=says(CALLING_TWICE)).bind_tools([get_weather]).invoke("hi")
    assert isinstance(answer, AIMessage) and answer.tool_calls[0]["args"] == CALLED


@check
def errors_have_the_client_types() -> None:
    raises(openai.BadRequestError, lambda: chat(extra_body={"bogus": 1}).invoke("hi"))
    raises(openai.NotFoundError, lambda: chat("no-such-model").invoke("hi"))
    raises(openai.InternalServerError, lambda: chat(extra_body=fails("Unknown")).invoke("hi"))
    late = FailsLater()
    raises(openai.APIError, lambda: late.read(chat(extra_body=late.body).stream("hi")))


@check
def unauthorized_keys_are_refused() -> None:
    assert chat(url=KEYED_URL, key=GOOD_KEY).invoke("hi").content == GREETING
    raises(openai.AuthenticationError, lambda: chat(url=KEYED_URL, key="key-wrong").invoke("hi"))
    raises(openai.PermissionDeniedError, lambda: chat(url=KEYED_URL, key=NARROW_KEY).invoke("hi"))
    slow = chat(url=KEYED_URL, key=SLOW_KEY)
    slow.invoke("hi")
    raises(openai.RateLimitError, lambda: slow.invoke("hi"))


if __name__ == "__main__":
    print(f"langchain-openai {version('langchain-openai')} on Python {sys.version.split()[0]}", flush=True)
    main()
