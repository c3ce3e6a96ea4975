"""Structured output through every layer: the text has the requested format, streamed and whole."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "structured-output.md"
MESSAGES: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`demo` expects calls as JSON, `tagged` in the format of its model."""
    with Cluster(tmp_path_factory.mktemp("structured")) as cluster:
        cluster.run("cpu", "--model-name", "demo")
        tags = ("--dyn-tool-call-parser", "hermes", "--dyn-structural-tag", "true")
        cluster.run("cpu", "--model-name", "tagged", "--namespace", "tagged", *tags)
        wait_until(lambda: cluster.workers() == 2, "the workers never appeared")
        wait_until(lambda: len(cluster.http.get("/v1/models").json()["data"]) == 2, "the models never appeared")
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return cluster.openai()


def answer(client: openai.OpenAI, model: str = "demo", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=MESSAGES, **options).choices[0]


def streamed(client: openai.OpenAI, model: str = "demo", **options: Any) -> tuple[str, list[dict[str, str]], str]:
    """Return the text, the calls and the finish reason of a stream, assembled."""
    text, calls, reason = "", [], ""
    for chunk in client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    calls.append({"name": part.function.name, "arguments": ""})
                calls[part.index]["arguments"] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return text, calls, reason


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_response_matches_its_schema(client: openai.OpenAI, temperature: float) -> None:
    choice = answer(client, response_format=FORM, temperature=temperature, seed=3)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), CITY)
    text, _, reason = streamed(client, response_format=FORM, temperature=temperature, seed=3)
    assert (text, reason) == (choice.message.content, "stop")


def test_every_choice_matches_its_schema(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="demo", messages=MESSAGES, response_format=FORM, n=3, temperature=1.5)
    for choice in made.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)


def test_truncated_json_object_is_a_valid_prefix(client: openai.OpenAI) -> None:
    choice = answer(client, response_format={"type": "json_object"}, max_tokens=40, temperature=0)
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.finish_reason == "length"


def test_patterns_and_choices_are_enforced_for_chats_and_completions(client: openai.OpenAI) -> None:
    pattern = {"guided_regex": "[0-9]{2}:[0-9]{2}"}
    assert re.fullmatch(pattern["guided_regex"], answer(client, extra_body=pattern).message.content)
    made = client.completions.create(model="demo", prompt="It is", extra_body=pattern)
    assert re.fullmatch(pattern["guided_regex"], made.choices[0].text)
    assert answer(client, extra_body={"guided_choice": ["yes", "no"]}).message.content in ("yes", "no")


def test_a_stop_string_ends_a_guided_text_before_it(client: openai.OpenAI) -> None:
    choice = answer(client, extra_body={"guided_regex": "abcdef"}, stop=["d"])
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")


def test_guided_text_has_logprobs_of_all_tokens(client: openai.OpenAI) -> None:
    choice = answer(client, extra_body={"guided_regex": "abc[0-9]{4}"}, logprobs=True, top_logprobs=2)
    assert re.fullmatch("abc[0-9]{4}", choice.message.content)
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode() == choice.message.content
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


def test_guided_output_does_not_depend_on_the_cache(client: openai.OpenAI) -> None:
    long: Any = [{"role": "system", "content": "Answer briefly. " * 20}, *MESSAGES]
    options: Any = {"response_format": FORM, "seed": 7, "temperature": 1.5}
    first, again = (client.chat.completions.create(model="demo", messages=long, **options) for _ in range(2))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("model", ["demo", "tagged"])
def test_required_call_is_generated_with_valid_arguments(client: openai.OpenAI, model: str, choice: Any) -> None:
    options: Any = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
    whole = answer(client, model, **options)
    assert whole.finish_reason == "tool_calls"
    assert not whole.message.content
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    text, calls, reason = streamed(client, model, **options)
    assert (text, reason) == ("", "tool_calls")
    assert calls == [{"name": "get_weather", "arguments": call.function.arguments}]


def test_only_offered_tools_are_called(client: openai.OpenAI) -> None:
    options: Any = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        (call,) = answer(client, temperature=1.5, seed=seed, **options).message.tool_calls
        assert call.function.name in ("get_weather", "now")
        assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_regex": "(?=a)b"}}, "look-around"),
        ({"extra_body": {"guided_json": {"not": {}}}}, "not"),
        ({"extra_body": {"guided_grammar": "nonsense"}}, "grammar"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "received: regex, choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}}, "'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "nope"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_format_is_rejected_before_the_response_begins(
    client: openai.OpenAI, options: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        client.chat.completions.create(model="demo", messages=MESSAGES, stream=stream, **options)


def test_examples_of_the_page_have_the_documented_output(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(
            compile(block.replace("http://localhost:8000", f"http://127.0.0.1:{cluster.port}"), PAGE.name, "exec"),
            names,
        )
    assert names["weather"].city in capsys.readouterr().out
