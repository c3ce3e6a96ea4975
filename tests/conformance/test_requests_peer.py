"""Worker requests: our frontend and the released one send the same for the same HTTP request.

Both use a released worker that records its requests. The table gives the reason of each intended difference.
"""

import json
import os

import pytest
from benchmarks.peer import peer_python
from tests.cluster.peers import PeerCluster, RecordedRequests, require_peer

from dynamo.cpu.config import DEMO_MODEL

pytestmark = pytest.mark.conformance

READY_S = 90.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CAPTURE = os.path.join(os.path.dirname(__file__), "peer_capture.py")

USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of the next days",  # Without tools, their template gets a null.
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
CLAUDE = {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}


def seen(part):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]}


CHATS = {
    "nothing special": {},
    "a limit": {"max_tokens": 5},
    "both limits": {"max_tokens": 5, "max_completion_tokens": 7},
    "sampling": {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5},
    "choices": {"n": 2},
    "a stop": {"stop": "x"},
    "stops": {"stop": ["x", "y"], "stop_token_ids": [5, 6], "include_stop_str_in_output": True},
    "no end": {"ignore_eos": True, "min_tokens": 3},
    "special tokens": {"skip_special_tokens": False},
    "alternatives": {"logprobs": True, "top_logprobs": 3},
    "allowed": {"allowed_token_ids": [1, 2], "detokenize": False},
    "no effect": {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "modalities": ["text"]},
    "text": {"response_format": {"type": "text"}},
    "guided json": {"guided_json": {"type": "object"}},
    "guided regex": {"guided_regex": "a+"},
    "guided choice": {"guided_choice": ["a", "b"]},
    "guided grammar": {"guided_grammar": 'root ::= "a"'},
    "guided in detail": {
        "guided_json": {"type": "object"},
        "guided_whitespace_pattern": " *",
        "guided_decoding_backend": "xgrammar",
    },
    "an object": {"thinking": True, "response_format": {"type": "json_object"}},
    "a schema": {
        "thinking": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    "tools": {"tools": [TOOL]},
    "tools, one call": {"tools": [TOOL], "parallel_tool_calls": False},
    "no tools": {"tools": [TOOL], "tool_choice": "none"},
    "some tool": {"tools": [TOOL], "tool_choice": "required", "thinking": False},
    "some tool, once": {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "thinking": False,
    },
    "that tool": {"tools": [TOOL], "tool_choice": NAMED, "thinking": False},
    "thinking": {"thinking": True},
    "no thinking": {"thinking": {"type": "disabled"}},
    "adaptive thinking": {"thinking": {"type": "adaptive"}},
    "effort": {"reasoning_effort": "high"},
    "no effort": {"reasoning_effort": "none"},
    "effort without thinking": {"reasoning_effort": "high", "thinking": False},
    "template arguments": {"chat_template_args": {"enable_thinking": True}},
    "template kwargs": {"chat_template_kwargs": {"thinking_mode": "enabled", "foo": 1}},
    "a budget": {"thinking_token_budget": 9, "thinking": True},
    "the other budget": {"nvext": {"max_thinking_tokens": 11}, "thinking": False},
    "a salt": {"cache_salt": "abc"},
    "salts": {"cache_salt": "abc", "nvext": {"cache_salt": "def"}},
    "no prompt": {"add_generation_prompt": False},
    "to be continued": {
        "messages": [USER, {"role": "assistant", "content": "Once"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "annotations": {"nvext": {"annotations": ["x", "request_id"]}},
    "token data": {"nvext": {"token_data": [5, 6, 7]}},
    "extra fields": {"nvext": {"extra_fields": ["worker_id", "timing"]}},
    "metadata upload": {"nvext": {"metadata_upload": {"url": "http://x"}}},
    "hints": {"nvext": {"agent_hints": {"priority": 3, "strict_priority": 2, "osl": 50, "latency_sensitivity": 0.5}}},
    "a low priority": {"nvext": {"agent_hints": {"priority": -3}}},
    "a time": {"nvext": {"request_timestamp_ms": 123.5}},
    "taints": {"nvext": {"routing_constraints": {"required_taints": [], "preferred_taints": {"b": 0.5}}}},
    "levels": {"nvext": {"router": {"ttft_target": 1.0, "itl_target": 2.0}}},
    "a prefill rank": {"nvext": {"prefill_dp_rank": 1}},
    "an image": seen({"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}),
    "a sound": seen({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}),
    "media options": {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"video": {"num_frames": 4}}},
    "a tool's result": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ]
    },
}
HEADERS = {
    "a prefill worker": {"x-dynamo-prefill-instance-id": "6"},
    "a priority": {"x-dynamo-request-priority": "4", "x-dynamo-request-strict-priority": "2"},
    "no priority": {"x-dynamo-request-priority": "high"},
    "a tenant": {"x-tenant-id": "ten"},
    "a session": {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p", "x-dynamo-session-final": "true"},
    "claude": CLAUDE,
    "claude's other agent": {**CLAUDE, "x-claude-code-parent-agent-id": "b"},
    "codex": {"thread-id": "t", "x-codex-parent-thread-id": "u"},
    "opencode": {"x-session-id": "o", "x-parent-session-id": "q"},
    "several": {"x-dynamo-session-id": "s", "thread-id": "t", **CLAUDE},
    "no-such-model": {"x-dynamo-parent-session-id": "p"},
}
TEXTS = {
    "a text": {},
    "a batch": {"prompt": ["a", "b"]},
    "ids": {"prompt": [5, 6]},
    "alternatives of a text": {"logprobs": 2},
    "its own logprobs": {"logprobs": 0, "return_tokens_as_token_ids": True},
    "a stop that stays": {"stop": "x", "no_stop_trim": True},
    "a guided text": {"guided_choice": ["a"]},
    "a salted text": {"cache_salt": "x"},
}
CASES = {
    **{name: (CHAT, body, {}) for name, body in CHATS.items()},
    **{f"from {name}": (CHAT, {}, headers) for name, headers in HEADERS.items()},
    **{name: (COMPLETIONS, body, {}) for name, body in TEXTS.items()},
}

REFUSED = {
    "unknown": (CHAT, {"surprise": 1}),
    "unknown in nvext": (CHAT, {"nvext": {"surprise": 1}}),
    "no messages": (CHAT, {"messages": []}),
    "too hot": (CHAT, {"temperature": 3}),
    "no tool": (CHAT, {"tool_choice": "required"}),
    "another tool": (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    "no switch": (CHAT, {"thinking": {"type": "bogus"}}),
    "no effort": (CHAT, {"reasoning_effort": "bogus"}),
    "two constraints": (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}),
    "no url": (CHAT, seen({"type": "image_url", "image_url": {"url": "nowhere"}})),
    "a file": (CHAT, seen({"type": "file", "file": {"file_id": "x"}})),
    "tools of a text": (COMPLETIONS, {"tools": [TOOL]}),
    "special tokens of a text": (COMPLETIONS, {"add_special_tokens": False}),
    "short embeds": (COMPLETIONS, {"prompt_embeds": "AAAA"}),
}


class RecordingPeers(PeerCluster):
    """Both frontends with a released worker that records requests."""

    FLAGS = ()
    BASES = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "Hi there"}}

    def __init__(self, folder):
        super().__init__(folder, "--router-mode", "round-robin", *self.FLAGS)
        self.records = RecordedRequests(folder / "records.jsonl")
        self.run([peer_python(), CAPTURE, DEMO_MODEL, "m", str(self.records.path), "hermes", "qwen3"])
        self.wait_answered(CHAT, {"model": "m", "messages": [USER]})

    def post(self, name, path, body, headers=None):
        content = {"model": "m", **self.BASES[path], **body}
        response = self.request(self.ports[name], "POST", path, content, headers)
        return response.status, response.json

    def sent(self, name, path, body, headers):
        """Return the requests that the worker received, in an order that does not depend on timing."""
        before = self.records.count()
        status, answer = self.post(name, path, body, headers)
        assert status == 200, answer
        return sorted(map(settled, self.records.since(before)), key=lambda one: one["token_ids"])


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    require_peer()
    with RecordingPeers(tmp_path_factory.mktemp("requests")) as peers:
        yield peers


def settled(request):
    """Return a request without its intended differences.

    The two implementations compute a card's checksum differently; for a request without routing the released one sends
    an empty value; and our frontend fills absent sampling fields from the model's configuration.
    """
    request = {**request, "mdc_sum": None, "routing": request["routing"] or None}
    defaults = {"temperature": 0.3, "top_p": 0.9, "top_k": 20}
    sampling = request["sampling_options"]
    for field, value in defaults.items():
        if sampling[field] == value:
            sampling = {**sampling, field: None}
    return {**request, "sampling_options": sampling}


@pytest.mark.parametrize("name", CASES)
def test_both_frontends_send_workers_the_same_request(peers, name):
    path, body, headers = CASES[name]
    assert peers.sent("ours", path, body, headers) == peers.sent("theirs", path, body, headers)


@pytest.mark.parametrize("name", REFUSED)
def test_both_frontends_refuse_the_same_requests(peers, name):
    path, body = REFUSED[name]
    assert peers.post("theirs", path, body)[0] == peers.post("ours", path, body)[0] == 400


def script(*texts, **more):
    return {"annotations": ["script:" + json.dumps({"texts": texts, **more})]}


def call(city):
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


ANSWERS = {
    "a text": {"nvext": script("Hello there.")},
    "thoughts": {"nvext": script("<think>\nhm\n</think>\n\nyes 👩‍👩‍👧", cached=7)},
    "thoughts without an end": {"nvext": script("<think>hm")},
    "a call": {"tools": [TOOL], "nvext": script("Let me look.\n" + call("Oslo"))},
    "thoughts and a call": {"tools": [TOOL], "nvext": script("<think>hm</think>" + call("Oslo"))},
    "a call at the limit": {"tools": [TOOL], "nvext": script(call("Oslo"), finish_reason="length")},
    "a call cut off": {"tools": [TOOL], "nvext": script(call("Oslo")[:60], finish_reason="length")},
    "no call": {"tools": [TOOL], "nvext": script("<tool_call>nonsense</tool_call> after")},
    "an unwanted call": {"tools": [TOOL], "tool_choice": "none", "nvext": script(call("Oslo"))},
    "a call that must be": {
        "tools": [TOOL],
        "tool_choice": "required",
        "nvext": script('[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'),
    },
    "that call": {"tools": [TOOL], "tool_choice": NAMED, "nvext": script('{"city": "Oslo"}')},
    "that call after thoughts": {
        "tools": [TOOL],
        "tool_choice": NAMED,
        "nvext": script('<think>x</think>{"city": "Oslo"}'),
    },
    "a stop string": {"stop": ["you"], "nvext": script("Hi you there")},
    "why it stopped": {"nvext": {"extra_fields": ["stop_reason"], **script("Hi", stop_reason=77)}},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_both_frontends_send_clients_the_same_response(peers, name):
    reported = []
    for implementation in ("ours", "theirs"):
        status, answer = peers.post(implementation, CHAT, ANSWERS[name])
        assert status == 200, answer
        for choice in answer["choices"]:
            for one in choice["message"].get("tool_calls", ()):
                assert one.pop("id").startswith("call-")
        reported.append({key: answer.get(key) for key in ("choices", "usage", "nvext", "object", "model")})
    assert reported[0] == reported[1]
