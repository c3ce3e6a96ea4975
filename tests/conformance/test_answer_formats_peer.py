"""Responses and Anthropic messages: both frontends send the same requests and return the same responses.

Both use a released worker that records its requests. The table gives the reason of each intended difference.
"""

import http.client
import json
from contextlib import closing

import pytest
from benchmarks.stacks import HOST
from tests.cluster.peers import require_peer
from tests.conformance.test_requests_peer import CHAT, TOOL, USER, RecordingPeers, call, script

pytestmark = pytest.mark.conformance

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# Without a reasoning setting, theirs passes true to the template and ours passes nothing; where a message
# disables reasoning, theirs passes nothing and ours passes false.
BASES = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 50, "thinking": {"type": "adaptive"}},
}
FUNCTION = {"type": "function", **TOOL["function"]}
CUSTOM = {
    "name": "get_weather",
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}
BILLING = "x-anthropic-billing-header: cc_version=1; cch=abc;"


class FormatPeers(RecordingPeers):
    """Both frontends with Anthropic's API."""

    FLAGS = ("--enable-anthropic-api",)
    BASES = BASES


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    require_peer()
    with FormatPeers(tmp_path_factory.mktemp("formats")) as peers:
        yield peers


REQUESTED = {
    "a text": (RESPONSES, {}),
    "instructions": (RESPONSES, {"instructions": "Be brief."}),
    "sampling": (RESPONSES, {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9}),
    "a developer": (RESPONSES, {"input": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]}),
    "parts": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}]}),
    "a conversation": (RESPONSES, {
        "input": [
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ],
        "tools": [FUNCTION],
    }),
    "an own answer": (RESPONSES, {
        "input": [
            {"role": "user", "content": "u"},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "a", "annotations": []}]},
            {"role": "user", "content": "v"},
        ],
    }),
    "tools": (RESPONSES, {"tools": [FUNCTION]}),
    "no tools": (RESPONSES, {"tools": [FUNCTION], "tool_choice": "none"}),
    "some tool": (RESPONSES, {"tools": [FUNCTION], "tool_choice": "required"}),
    "that tool": (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "get_weather"}}),
    "a schema": (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}}),
    "an object": (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    "effort": (RESPONSES, {"reasoning": {"effort": "low"}}),
    "a message": (MESSAGES, {}),
    "a system prompt": (MESSAGES, {"system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}),
    "a billing line": (MESSAGES, {"system": f"{BILLING}\nYou help."}),
    "a billing block": (MESSAGES, {"system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "You help."}]}),
    "a message's sampling": (MESSAGES, {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "stop_sequences": ["zz"]}),
    "a message's tools": (MESSAGES, {"tools": [CUSTOM]}),
    "any tool": (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "any"}}),
    "a named tool": (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "tool", "name": "get_weather"}}),
    "no tool of a message": (MESSAGES, {"tools": [CUSTOM], "tool_choice": {"type": "none"}}),
    "a result": (MESSAGES, {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "R", "signature": "s"}, {"type": "text", "text": "T"},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "42"}, {"type": "text", "text": "go"},
            ]},
        ],
        "tools": [CUSTOM],
    }),
    "an output format": (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    "a budget": (MESSAGES, {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
}  # fmt: skip

LEFT_OPEN = ("extra_args", "require_reasoning")
"""The reasoning fields of worker requests are compared for chats (test_requests_peer.py); the released frontend
requests the reason of a message's end, which our workers always return."""


def essence(sent):
    return [{key: value for key, value in one.items() if key not in LEFT_OPEN} for one in sent]


@pytest.mark.parametrize("name", REQUESTED)
def test_both_frontends_send_workers_the_same_request(peers, name):
    path, body = REQUESTED[name]
    assert essence(peers.sent("ours", path, body, {})) == essence(peers.sent("theirs", path, body, {}))


def plain(value):
    """Return a response without ids and times."""
    if isinstance(value, dict):
        return {
            key: plain(one) for key, one in value.items() if key not in ("id", "call_id", "created_at", "completed_at")
        }
    return [plain(one) for one in value] if isinstance(value, list) else value


REPORTED = {
    "a text": {"nvext": script("Hello there.", cached=3)},
    "cut off": {"nvext": script("Hello", finish_reason="length")},
    "a call": {"tools": [FUNCTION], "nvext": script(call("Oslo"))},
    "settings": {"instructions": "i", "metadata": {"a": "b"}, "max_output_tokens": 9, "temperature": 0.5, "user": "u"},
    "a format": {"text": {"format": {"type": "json_object"}}, "nvext": script("{}")},
}

OURS_ALONE = {"store", "user", "usage", "tools"}
"""Responses are stored here; the user is repeated; the current client requires one more count; a tool that was not
declared strict stays non-strict.
"""


@pytest.mark.parametrize("name", REPORTED)
def test_responses_api_fields_and_values_equal_the_released_frontends(peers, name):
    ours, theirs = (peers.post(implementation, RESPONSES, REPORTED[name])[1] for implementation in ("ours", "theirs"))
    assert theirs["output"] and set(theirs) <= set(ours)
    for key in set(theirs) - OURS_ALONE - {"id", "created_at", "completed_at"}:
        assert plain(ours[key]) == plain(theirs[key]), key
    for key in ("input_tokens", "output_tokens", "total_tokens"):
        assert ours["usage"][key] == theirs["usage"][key]


def test_anthropic_message_equals_the_released_frontends(peers):
    for body in (
        {"stop_sequences": ["there"]},
        {"messages": [USER, {"role": "user", "content": "and?"}]},
    ):
        ours, theirs = (peers.post(implementation, MESSAGES, body)[1] for implementation in ("ours", "theirs"))
        assert {key: ours["usage"][key] for key in ("input_tokens", "output_tokens")} == {
            key: theirs["usage"][key] for key in ("input_tokens", "output_tokens")
        }
        for key in ("type", "role", "content", "model", "stop_reason", "stop_sequence"):
            assert ours[key] == theirs[key]


def event_kinds(peers, implementation, path, body):
    """Return the kinds of a stream's events, without consecutive duplicates."""
    with closing(http.client.HTTPConnection(HOST, peers.ports[implementation], timeout=30)) as connection:
        data = json.dumps({"model": "m", **BASES[path], **body, "stream": True}).encode()
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream")
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("body", [{}, {"nvext": script("Hello", finish_reason="length")}])
def test_stream_events_have_the_same_order_as_the_released_frontends(peers, path, body):
    # As in Anthropic's own responses.
    ours = [kind for kind in event_kinds(peers, "ours", path, body) if kind != "ping"]
    assert ours == event_kinds(peers, "theirs", path, body)


REFUSED = {
    "no such model": (MESSAGES, {"model": "no-such-model"}, 404),
    "no messages": (MESSAGES, {"messages": []}, 400),
    "too hot": (MESSAGES, {"temperature": 9}, 400),
    "no tokens": (MESSAGES, {"max_tokens": 0}, 400),
    "a server's tool": (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400),
    "no such model for a response": (RESPONSES, {"model": "no-such-model"}, 404),
    "a response too hot": (RESPONSES, {"temperature": 9}, 400),
    "nothing asked": (RESPONSES, {"input": []}, 400),
    "a built-in tool": (RESPONSES, {"tools": [{"type": "web_search"}]}, 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_frontends_refuse_the_same_requests_with_the_same_status(peers, name):
    path, body, status = REFUSED[name]
    ours, theirs = (peers.post(implementation, path, body) for implementation in ("ours", "theirs"))
    assert ours[0] == theirs[0] == status
    if path == MESSAGES:
        assert {"type": ours[1]["type"], "kind": ours[1]["error"]["type"]} == {
            "type": theirs[1]["type"],
            "kind": theirs[1]["error"]["type"],
        }
