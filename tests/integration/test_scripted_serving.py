"""Real processes and real text: a frontend with a worker of scripted responses, called by OpenAI's own client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.scripted_engine.assembly import chat_of, plain
from tests.scripted_engine.script import Script

pytestmark = pytest.mark.integration

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø 🇳🇴"}}\n</tool_call>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a frontend that announces calls, and a scripted worker."""
    with Cluster(tmp_path_factory.mktemp("scripted"), "--enable-streaming-tool-dispatch") as cluster:
        cluster.scripted_worker()
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """Return OpenAI's own client, closed at the end with all its connections."""
    with cluster.openai() as client:
        yield client


def scripted(*texts: str, **more: Any) -> dict[str, Any]:
    return {"nvext": {"annotations": [Script(list(texts), **more).annotation()]}}


TEXTS = {
    "text": "Hello wörld 👩‍👩‍👧 — done",
    "thoughts": "<think>\nhm 🤔\n</think>\n\nFour.",
    "a call": "Let me look.\n" + CALL,
    "thoughts and calls": "<think>hm</think>" + CALL + "\n" + CALL,
}


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_chunks_assemble_to_the_whole_response(client: openai.OpenAI, name: str) -> None:
    extra = scripted(TEXTS[name], sizes=[1, 3])
    requested: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "extra_body": extra}
    whole = client.chat.completions.create(**requested)
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(**requested, stream=True, stream_options=options)
    # A call's announcement is an event of another kind; the client sees a chunk without choices.
    chunks = [chunk.model_dump(exclude_unset=True) for chunk in stream if chunk.choices]
    reported = plain(whole.model_dump(exclude_unset=True))
    assert chat_of(chunks)["choices"] == reported["choices"]


def test_tool_calls_are_streamed_with_name_and_id(cluster: Cluster) -> None:
    body = {"model": "m", "messages": MESSAGES, "tools": [WEATHER], "stream": True, **scripted(CALL)}
    text = cluster.post(body).text
    assert text.count("event: tool_call_dispatch\n") == 1
    assert text.endswith("data: [DONE]\n\n")


def test_error_in_a_stream_reaches_the_client_as_an_error_event(client: openai.OpenAI) -> None:
    extra = scripted("long " * 400, fails_after=200, fails_as="Unknown")
    # Where everything arrives in one frame, no byte was written yet, and the error has its own status.
    with (
        pytest.raises(openai.APIError),
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_body=extra) as stream,
    ):
        for _ in stream:
            pass


def test_error_before_the_stream_has_its_status(client: openai.OpenAI) -> None:
    extra = scripted("Hello", fails_after=0)
    with pytest.raises(openai.BadRequestError, match="the script says so"):
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True, extra_body=extra)


def test_forced_tool_call_is_parsed_by_the_sdk(client: openai.OpenAI) -> None:
    extra = scripted('[{"name": "get_weather", "parameters": {"city": "Oslo"}}]')
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=[WEATHER], tool_choice="required", extra_body=extra
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert answer.choices[0].finish_reason == "tool_calls"
