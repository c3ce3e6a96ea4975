"""Behaviours that the Open Responses specification (2026-04-24) requires, over HTTP and over a WebSocket.

Its own compliance suite is not published as a package, so these are our tests of the same behaviours.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.cluster.cluster import MODEL, Cluster, scripted
from tests.vision_model import image, write_model
from tests.websocket_line import Line

pytestmark = pytest.mark.integration

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


def nullable(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def fields(**properties: Any) -> dict[str, Any]:
    """Require an object with all of these fields."""
    return {"type": "object", "required": [*properties], "properties": properties}


STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
PART = {"type": "object", "required": ["type"]}
ITEMS = {
    "message": fields(
        id={"type": "string"},
        status=STATUS,
        role={"enum": ["user", "assistant", "system", "developer"]},
        content={"type": "array", "items": PART},
    ),
    "function_call": fields(
        id={"type": "string"},
        call_id={"type": "string"},
        name={"type": "string"},
        arguments={"type": "string"},
        status=STATUS,
    ),
    "reasoning": fields(id={"type": "string"}, summary={"type": "array"}),
    "compaction": fields(id={"type": "string"}, encrypted_content={"type": "string"}),
}
USAGE = fields(
    input_tokens={"type": "integer"},
    output_tokens={"type": "integer"},
    total_tokens={"type": "integer"},
    input_tokens_details=fields(cached_tokens={"type": "integer"}),
    output_tokens_details=fields(reasoning_tokens={"type": "integer"}),
)
RESPONSE = fields(
    id={"type": "string"},
    object={"const": "response"},
    created_at={"type": "integer"},
    completed_at=nullable("integer"),
    status={"type": "string"},
    incomplete_details=nullable("object"),
    model={"type": "string"},
    previous_response_id=nullable("string"),
    instructions=nullable("string"),
    output={"type": "array"},
    error=nullable("object"),
    tools={
        "type": "array",
        "items": fields(
            type={"const": "function"},
            name={"type": "string"},
            description=nullable("string"),
            parameters=nullable("object"),
            strict=nullable("boolean"),
        ),
    },
    tool_choice={},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls={"type": "boolean"},
    text=fields(format=fields(type={"type": "string"})),
    top_p={"type": "number"},
    presence_penalty={"type": "number"},
    frequency_penalty={"type": "number"},
    top_logprobs={"type": "integer"},
    temperature={"type": "number"},
    reasoning={"anyOf": [{"type": "null"}, fields(effort=nullable("string"), summary=nullable("string"))]},
    usage={"anyOf": [{"type": "null"}, USAGE]},
    max_output_tokens=nullable("integer"),
    max_tool_calls=nullable("integer"),
    store={"type": "boolean"},
    background={"type": "boolean"},
    service_tier={"type": "string"},
    metadata={"type": "object"},
    safety_identifier=nullable("string"),
    prompt_cache_key=nullable("string"),
)
COMPACTION = fields(
    id={"type": "string"},
    object={"const": "response.compaction"},
    output={"type": "array", "minItems": 1},
    created_at={"type": "integer"},
    usage=USAGE,
)
ERROR = fields(
    type={"const": "error"},
    status={"type": "integer"},
    error=fields(code={"type": "string"}, message={"type": "string"}),
)
EVENT_FIELDS = {
    "response.output_item.added": ("output_index", "item"),
    "response.output_item.done": ("output_index", "item"),
    "response.content_part.added": ("item_id", "output_index", "content_index", "part"),
    "response.content_part.done": ("item_id", "output_index", "content_index", "part"),
    "response.output_text.delta": ("item_id", "output_index", "content_index", "delta"),
    "response.output_text.done": ("item_id", "output_index", "content_index", "text"),
    "response.function_call_arguments.delta": ("item_id", "output_index", "delta"),
    "response.function_call_arguments.done": ("item_id", "output_index", "arguments"),
}
LAST_EVENTS = {"response.completed", "response.incomplete", "response.failed"}


def check_items(items: list[Any]) -> None:
    for item in items:
        jsonschema.validate(item, ITEMS[item["type"]])


def check_response(response: Any, status: str = "completed") -> Any:
    jsonschema.validate(response, RESPONSE)
    check_items(response["output"])
    assert response["status"] == status
    assert response["output"]
    return response


def check_events(events: list[Any]) -> Any:
    """Check the events of a stream; return its last response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        if "response" in event:
            jsonschema.validate(event["response"], RESPONSE)
        else:
            assert set(EVENT_FIELDS[event["type"]]) <= set(event), event
        if "item" in event:
            check_items([event["item"]])
    assert events[-1]["type"] in LAST_EVENTS
    return events[-1]["response"]


def text_of(response: Any) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("open-responses")) as cluster:
        cluster.scripted_worker()
        yield cluster


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


def create(cluster: Cluster, given: Any, status: int = 200, **options: Any) -> Any:
    answer = cluster.post({"model": MODEL, "input": given, **options}, "/v1/responses")
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(cluster: Cluster, given: Any, **options: Any) -> list[Any]:
    answer = cluster.post({"model": MODEL, "input": given, "stream": True, **options}, "/v1/responses")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ---- over HTTP ------------------------------------------------------------------------------------------------------

PHASES = [
    {"type": "message", "role": "assistant", "phase": "commentary", "content": "I should answer with the number."},
    {"type": "message", "role": "assistant", "phase": "final_answer", "content": "The number is four."},
]


@pytest.mark.parametrize(
    "given",
    [
        "Say hello in exactly 3 words.",
        [user("Say hello in exactly 3 words.")],
        [{"type": "message", "role": "system", "content": "You are a pirate."}, user("Say hello.")],
        [*PHASES, user("Repeat only the number.")],
        [user("My name is Alice."), {"type": "message", "role": "assistant", "content": "Hello Alice!"}, user("And?")],
    ],
)
def test_responses_api_accepts_every_kind_of_text_input(cluster: Cluster, given: Any) -> None:
    check_response(create(cluster, given))


def test_responses_api_stream_has_the_events_of_the_specification(cluster: Cluster) -> None:
    assert text_of(check_response(check_events(stream(cluster, [user("Count from 1 to 5.")])))) == "Hello there."


@pytest.mark.parametrize("strict", [None, False])
def test_responses_api_calls_functions_and_repeats_tools_with_strict(cluster: Cluster, strict: bool | None) -> None:
    tool = WEATHER if strict is None else WEATHER | {"strict": strict}
    response = check_response(create(cluster, [user("Weather?")], tools=[tool], **scripted(CALL)))
    [call] = response["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert response["tools"] == [WEATHER | {"strict": strict is not False}]
    bare = create(cluster, "hi", tools=[{"type": "function", "name": "f"}])["tools"]
    assert bare == [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": True}]
    events = stream(cluster, [user("Weather?")], tools=[tool], **scripted(CALL))
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {
        event["type"] for event in events
    }
    check_response(check_events(events))


def test_responses_api_continues_after_a_function_call(cluster: Cluster) -> None:
    first = create(cluster, "Weather?", tools=[WEATHER], **scripted(CALL))
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "12 degrees"}
    check_response(create(cluster, [result], tools=[WEATHER], previous_response_id=first["id"]))
    stray = create(cluster, [result | {"call_id": "call_1"}], 400, previous_response_id=first["id"])
    assert stray["error"]["param"] == "input" and "call_1" in stray["error"]["message"]


def test_responses_api_takes_sampling_fields_of_chats(cluster: Cluster) -> None:
    response = create(
        cluster, "hi", top_k=5, min_p=0.1, seed=1, repetition_penalty=1.1, stop=["zzz"], frequency_penalty=0.5,
        presence_penalty=0.25,
    )  # fmt: skip
    check_response(response)
    assert (response["frequency_penalty"], response["presence_penalty"]) == (0.5, 0.25)
    assert text_of(create(cluster, "hi", stop="there")) == "Hello "
    check_response(create(cluster, "hi", response_format={"type": "text"}))
    for name, value in {
        "top_k": "x",
        "seed": "x",
        "repetition_penalty": "x",
        "stop": 5,
        "response_format": "x",
    }.items():
        assert create(cluster, "hi", 400, **{name: value})["error"]["param"] == name
    both = {"response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}}}
    assert create(cluster, "hi", 400, **both)["error"]["param"] == "response_format"


def test_responses_api_takes_images(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.mocker("--model-path", write_model(tmp_path / "model"))
        parts = [
            {"type": "input_text", "text": "What do you see?"},
            {"type": "input_image", "image_url": image(28, 28)["image_url"]["url"]},
        ]
        response = create(cluster, [user(parts)], max_output_tokens=16)
        check_response(response, response["status"])
        text_alone = create(cluster, [user(parts[:1])], max_output_tokens=16)
        assert response["usage"]["input_tokens"] > text_alone["usage"]["input_tokens"]


# ---- compaction -----------------------------------------------------------------------------------------------------

CONVERSATION = [
    user("We agreed to launch on Tuesday and notify support first."),
    {"type": "message", "role": "assistant", "content": "Understood. The launch is Tuesday."},
]


def compact(cluster: Cluster, status: int = 200, **body: Any) -> Any:
    answer = cluster.post(body, "/v1/responses/compact")
    assert answer.status_code == status, answer.text
    return answer.json()


def test_compaction_replaces_items_by_a_summary_and_can_be_continued(cluster: Cluster) -> None:
    compaction = compact(cluster, model=MODEL, input=CONVERSATION, prompt_cache_key="k")
    jsonschema.validate(compaction, COMPACTION)
    check_items(compaction["output"])
    assert [item["type"] for item in compaction["output"]] == ["message", "compaction"]
    longer = create(cluster, [*compaction["output"], user("When?")])
    check_response(longer)
    assert longer["usage"]["input_tokens"] > create(cluster, "When?")["usage"]["input_tokens"]
    again = compact(cluster, model=MODEL, input=[*compaction["output"], user("When?")])
    assert [item["type"] for item in again["output"]] == ["message", "message", "compaction"]
    first = create(cluster, "hi")
    followed = compact(cluster, model=MODEL, previous_response_id=first["id"])
    assert [item["type"] for item in followed["output"]] == ["message", "compaction"]


def test_compaction_refuses_bad_requests_by_field(cluster: Cluster) -> None:
    assert compact(cluster, 400, input=CONVERSATION)["error"]["param"] == "model"
    assert compact(cluster, 400, model=MODEL)["error"]["param"] == "input"
    assert compact(cluster, 400, model=MODEL, input="hi", bogus=1)["error"]["param"] == "bogus"
    assert compact(cluster, 404, model="none", input="hi")["error"]["param"] == "model"
    assert compact(cluster, 404, model=MODEL, previous_response_id="resp_1")["error"]["code"] == (
        "previous_response_not_found"
    )
    foreign = {"type": "compaction", "encrypted_content": "gAAAAA"}
    assert "encrypted_content" in create(cluster, [foreign, user("hi")], 400)["error"]["message"]


# ---- over a WebSocket -----------------------------------------------------------------------------------------------


class Socket(Line):
    """Connection on which responses are created."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.port, "/v1/responses")

    def turn(self, given: Any, **options: Any) -> Any:
        """Send one request; return its last response, or its error."""
        self.send_event({"type": "response.create", "model": MODEL, "input": given, **options})
        return self.answer()

    def answer(self) -> Any:
        events = [self.receive_event()]
        while events[-1]["type"] not in {*LAST_EVENTS, "error"}:
            events.append(self.receive_event())
        if events[-1]["type"] == "error":
            jsonschema.validate(events[-1], ERROR)
            return events[-1]
        return check_events(events)


@pytest.fixture
def line(cluster: Cluster) -> Iterator[Socket]:
    line = Socket(cluster)
    yield line
    line.close()


def test_websocket_serves_requests_in_order(line: Socket) -> None:
    check_response(line.turn([user("Count from 1 to 3.")]))
    for number in range(20):
        line.send_event({"type": "response.create", "model": MODEL, "input": f"Say {number}.", "store": False})
    for _ in range(20):
        assert text_of(check_response(line.answer())) == "Hello there."


def test_websocket_continues_an_unstored_response_on_its_connection_only(cluster: Cluster, line: Socket) -> None:
    first = check_response(line.turn("Remember the code word: cobalt.", store=False))
    second = check_response(line.turn("Which?", store=False, previous_response_id=first["id"]))
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    third = check_response(line.turn("And?", store=False, previous_response_id=second["id"]))
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    other = Socket(cluster)
    refused = other.turn("Go on.", store=False, previous_response_id=third["id"])
    assert (refused["status"], refused["error"]["code"]) == (404, "previous_response_not_found")
    check_response(other.turn("Start again.", store=False))
    other.close()
    stored = check_response(line.turn("hi"))
    check_response(create(cluster, "and?", previous_response_id=stored["id"]))


def test_websocket_forgets_a_response_whose_continuation_failed(line: Socket) -> None:
    first = check_response(line.turn("Remember the code word: ember.", store=False))
    result = {"type": "function_call_output", "call_id": "call_missing", "output": "none"}
    failed = line.turn([result], store=False, previous_response_id=first["id"])
    assert failed["status"] == 400
    retried = line.turn("Go on.", store=False, previous_response_id=first["id"])
    assert retried["error"]["code"] == "previous_response_not_found"


def test_websocket_starts_a_chain_from_a_compaction(cluster: Cluster, line: Socket) -> None:
    output = compact(cluster, model=MODEL, input=CONVERSATION)["output"]
    check_response(line.turn([*output, user("Continue from here.")], store=False, tools=[]))


def test_websocket_refuses_bad_messages_and_stays_open(line: Socket) -> None:
    for message, param in [
        ({"type": "session.update"}, "type"),
        ([1], "type"),
        ({"type": "response.create", "input": "hi"}, "model"),
        ({"type": "response.create", "model": MODEL, "input": "hi", "background": True}, "background"),
        ({"type": "response.create", "model": MODEL, "input": "hi", "temperature": "x"}, "temperature"),
        ({"type": "response.create", "model": "none", "input": "hi"}, "model"),
    ]:
        line.send_event(message)
        assert line.answer()["error"]["param"] == param
    check_response(line.turn("hi", stream=True))


def test_get_without_websocket_handshake_is_refused(cluster: Cluster) -> None:
    refused = cluster.http.get("/v1/responses")
    assert refused.status_code == 400 and "WebSocket" in refused.json()["error"]["message"]
