"""Guided decoding: for every response format, our frontend sends workers the same options as the released one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from benchmarks.corpus import bench_model
from benchmarks.peer import peer_python
from tests.cluster.peers import PeerCluster, RecordedRequests, require_peer

pytestmark = pytest.mark.conformance

CHAT = "/v1/chat/completions"
ENGINE = "engine"
"""The name of the embedded engine among the models."""
MODELS = {
    "plain": "::",
    "hermes": "hermes::",
    "thinks": "hermes:qwen3:",
    "tagged": "hermes::{}",
    "strict": 'hermes::{"scope": "always", "schema": "strict"}',
    "tagged-thinks": "hermes:qwen3:{}",
    "coder": "qwen3_coder::{}",
    "glm": "glm47::{}",
    "kimi": "kimi_k2::{}",
    "deepseek": "deepseek_v4::{}",
    "inkling": "inkling::{}",
    "mistral": "mistral::{}",
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
CLOSED = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "s", "strict": True, "parameters": CLOSED}}
OPEN = {"type": "function", "function": {"name": "s", "strict": True, "parameters": CITY}}
LOOSE = {"type": "function", "function": {"name": "l", "strict": False, "parameters": CITY}}
DEFINED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "$defs": {"P": {"type": "integer"}},
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P"}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}

FORMS: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"response_format": {**SCHEMA, "json_schema": {"name": "x", "schema": CITY, "strict": True}}},
    {"guided_json": CITY},
    {"guided_json": json.dumps(CITY)},
    {"guided_json": CITY, "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": "[ ]*"},
    {"guided_json": CITY, "response_format": {"type": "json_object"}},
    {"guided_regex": "a+"},
    {"guided_choice": ["a", "b"]},
    {"guided_choice": []},
    {"guided_grammar": 'root ::= "a"'},
    {"guided_decoding_backend": "xgrammar"},
    {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " "},
    {"tools": [WEATHER], "tool_choice": "auto", "guided_choice": ["a"]},
    {"tools": [DEFINED, WEATHER], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}, "thinking": False},
]
CALLS: list[dict[str, Any]] = [
    {"tools": [WEATHER]},
    {"tools": [WEATHER, NOW], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER, NOW], "tool_choice": NAMED},
    {"tools": [WEATHER], "tool_choice": NAMED, "parallel_tool_calls": False},
    {"tools": [WEATHER, STRICT]},
    {"tools": [WEATHER, LOOSE], "tool_choice": "required"},
    {"tools": [WEATHER], "parallel_tool_calls": False},
    {"tools": [STRICT], "tool_choice": "none"},
    {"tools": [STRICT], "response_format": {"type": "json_object"}},
    {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
]


class GuidedPeers(PeerCluster):
    """Both frontends before a released worker that records requests and a worker of the embedded engine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--router-mode", "round-robin")
        self.records = RecordedRequests(folder / "records.jsonl")
        names = [f"{name}:{rest}" for name, rest in MODELS.items()]
        script = str(Path(__file__).parent / "peer_guided.py")
        self.run([peer_python(), script, bench_model(), str(self.records.path), *names])
        self.run([sys.executable, "-m", "dynamo.cpu", "--model-name", ENGINE])
        self.wait_listed({*MODELS, ENGINE})

    def sent(self, name: str, model: str, fields: dict[str, Any], path: str = CHAT) -> Any:
        """Return the request that the worker received, or the status where it received none."""
        before = self.records.count()
        body = {"model": model, **fields}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": "hi"}]
        status = self.request(self.ports[name], "POST", path, body).status
        lines = self.records.since(before)
        return lines[0] if lines else status

    def chat(self, name: str, body: Any) -> tuple[int, Any]:
        response = self.request(self.ports[name], "POST", CHAT, body)
        return response.status, response.json


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuidedPeers]:
    require_peer()
    with GuidedPeers(tmp_path_factory.mktemp("guided")) as peers:
        yield peers


@pytest.mark.parametrize("model", ["plain", "thinks"])
def test_both_frontends_send_the_same_guided_decoding_options(peers: GuidedPeers, model: str) -> None:
    differing = [
        (fields, ours, theirs)
        for fields in FORMS
        if (ours := peers.sent("ours", model, fields)) != (theirs := peers.sent("theirs", model, fields))
    ]
    assert differing == []


@pytest.mark.parametrize("model", MODELS)
def test_both_frontends_send_the_same_options_for_tool_calls(peers: GuidedPeers, model: str) -> None:
    differing = [
        (fields, ours, theirs)
        for fields in CALLS
        if (ours := peers.sent("ours", model, fields)) != (theirs := peers.sent("theirs", model, fields))
    ]
    assert differing == []


def test_both_frontends_refuse_contradictory_guided_options(peers: GuidedPeers) -> None:
    for fields in (
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"tool_choice": "required"},
        {"tools": [OPEN]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "text"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ):
        assert [peers.sent(frontend, "plain", fields) for frontend in peers.ports] == [400, 400], fields


def test_both_frontends_send_the_same_guided_options_for_completions(peers: GuidedPeers) -> None:
    fields = {"prompt": "x", "guided_choice": ["a"]}
    ours, theirs = (peers.sent(frontend, "thinks", fields, "/v1/completions") for frontend in ("ours", "theirs"))
    assert ours == theirs == {"guided_decoding": {"choice": ["a"]}, "require_reasoning": None}


@pytest.mark.parametrize("frontend", ["ours", "theirs"])
def test_embedded_engine_follows_the_guided_options_of_both_frontends(peers: GuidedPeers, frontend: str) -> None:
    bounded = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 9},
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    body = {"model": ENGINE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 90, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bounded, "strict": True}}
    status, answer = peers.chat(frontend, {**body, "response_format": form})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), bounded)
    tool = {"type": "function", "function": {"name": "f", "parameters": bounded}}
    calling = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    status, answer = peers.chat(frontend, {**body, **calling})
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    jsonschema.validate(json.loads(call["function"]["arguments"]), bounded)
    status, answer = peers.chat(frontend, {**body, "guided_regex": "(?=a)b"})
    assert status == 400
    assert "look-around" in json.dumps(answer)
