"""Routing and session data from request headers."""

from typing import Any

import pytest

from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import AgentHints, NvExt
from dynamo.protocols.openai import decode_chat, decode_completion
from dynamo.serving.request_headers import agent_context, trigger_of, with_headers

BY_HEX = {"backend_instance_id": 0x31C069480B3E5B6C, "decode_worker_id": 0x31C069480B3E5B6C}


def headers(**given: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]


def test_nvext_is_unchanged_without_routing_headers() -> None:
    nvext = NvExt(cache_salt="a")
    assert with_headers(None, headers(host="x", accept="y")) is None
    assert with_headers(nvext, headers(host="x")) is nvext


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"x_dynamo_worker_instance_id": str((1 << 64) - 1)},
            {"backend_instance_id": (1 << 64) - 1, "decode_worker_id": (1 << 64) - 1},
        ),
        ({"x_dynamo_worker_instance_id": "31c069480b3e5b6c"}, BY_HEX),
        ({"x_dynamo_worker_instance_id": "0x31C069480b3e5b6c"}, BY_HEX),
        ({"x_dynamo_prefill_instance_id": "a"}, {"prefill_worker_id": 10}),
        ({"x_worker_instance_id": "5"}, {"backend_instance_id": 5, "decode_worker_id": 5}),
        ({"x_dynamo_prefill_instance_id": "6"}, {"prefill_worker_id": 6}),
        ({"x_dynamo_dp_rank": "1"}, {"dp_rank": 1}),
        ({"x_dp_rank": "1"}, {"dp_rank": 1}),
        ({"x_data_parallel_rank": "1"}, {"dp_rank": 1}),
        ({"x_dynamo_prefill_dp_rank": "2"}, {"prefill_dp_rank": 2}),
        ({"x_dynamo_request_priority": "-4"}, {"agent_hints": AgentHints(priority=-4)}),
        ({"x_dynamo_request_strict_priority": "4"}, {"agent_hints": AgentHints(strict_priority=4)}),
        ({"x_tenant_id": "ten"}, {"cache_salt": "ten"}),
    ],
)
def test_routing_header_sets_its_nvext_field(given: dict[str, str], expected: dict[str, Any]) -> None:
    assert with_headers(None, headers(**given)) == NvExt(**expected)


@pytest.mark.parametrize(
    "given",
    [
        {"x_dynamo_worker_instance_id": ""},
        {"x_dynamo_prefill_instance_id": " "},
        {"x_dynamo_dp_rank": "-1"},
        {"x_dynamo_request_priority": "1.5"},
        {"x_dynamo_request_strict_priority": "-1"},
        {"x_dynamo_prefill_dp_rank": "99999999999"},
        {"x_tenant_id": ""},
    ],
)
def test_invalid_optional_header_value_is_ignored(given: dict[str, str]) -> None:
    assert with_headers(None, headers(**given)) == NvExt()


@pytest.mark.parametrize(
    "name", ["x_dynamo_worker_instance_id", "x_worker_instance_id", "x_dynamo_prefill_instance_id"]
)
@pytest.mark.parametrize("value", ["xyz", "-1", "1.5", str(1 << 64), "1" + "0" * 16 + "f", "0x"])
def test_malformed_worker_id_header_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an instance id"):
        with_headers(None, headers(**{name: value}))


def test_header_overrides_only_its_nvext_field_of_the_body() -> None:
    body = NvExt(cache_salt="mine", dp_rank=3, agent_hints=AgentHints(priority=9, osl=50))
    reported = with_headers(body, headers(x_tenant_id="ten", x_dynamo_request_priority="4"))
    assert reported == NvExt(cache_salt="ten", dp_rank=3, agent_hints=AgentHints(priority=4, osl=50))
    assert body == NvExt(cache_salt="mine", dp_rank=3, agent_hints=AgentHints(priority=9, osl=50))


CLAUDE = {"x_claude_code_session_id": "c"}


@pytest.mark.parametrize(
    ("given", "session", "parent"),
    [
        ({"x_dynamo_session_id": "s"}, "s", None),
        ({"x_dynamo_session_id": "s", "x_dynamo_parent_session_id": "p"}, "s", "p"),
        ({"x_dynamo_session_id": "s", **CLAUDE}, "s", None),
        (CLAUDE, "c", None),
        ({**CLAUDE, "x_claude_code_agent_id": "a"}, "a", "c"),
        ({**CLAUDE, "x_claude_code_agent_id": "a", "x_claude_code_parent_agent_id": "b"}, "a", "b"),
        ({**CLAUDE, "x_claude_code_parent_agent_id": "b"}, "c", None),
        ({**CLAUDE, "thread_id": "t"}, "c", None),
        ({"thread_id": "t", "x_codex_parent_thread_id": "u"}, "t", "u"),
        ({"thread_id": "t", "x_session_id": "o"}, "t", None),
        ({"x_session_id": "o", "x_parent_session_id": "q"}, "o", "q"),
    ],
)
def test_session_headers_set_the_session_ids(given: dict[str, str], session: str, parent: str | None) -> None:
    context = agent_context(headers(**given), "other")
    assert context is not None
    assert (context["session_id"], context.get("parent_session_id")) == (session, parent)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"x_dynamo_session_id": ""},
        {"x_dynamo_parent_session_id": "p"},
        {"x_dynamo_session_final": "true"},
        {"x_claude_code_agent_id": "a"},
        {"x_codex_parent_thread_id": "u"},
    ],
)
def test_context_is_none_without_a_session_header(given: dict[str, str]) -> None:
    assert agent_context(headers(**given), "other") is None


def test_agent_context_contains_agent_headers_and_the_final_flag() -> None:
    given = headers(x_dynamo_session_id="s", x_dynamo_session_final="1", thread_id="t")
    assert agent_context(given, "user_message") == {
        "session_id": "s",
        "session_final": True,
        "agent_headers": {"thread-id": ["t"]},
        "input_trigger": "user_message",
    }
    again = agent_context(headers(x_dynamo_session_id="s", x_dynamo_session_final="false"), "other")
    assert again is not None
    assert again["session_final"] is False


@pytest.mark.parametrize(
    ("last", "trigger"),
    [
        ({"role": "user", "content": "a"}, "user_message"),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, "tool_result"),
        ({"role": "system", "content": "a"}, "other"),
        ({"role": "assistant", "content": "a"}, "other"),
    ],
)
def test_input_trigger_is_derived_from_the_last_message(last: dict[str, str], trigger: str) -> None:
    assert trigger_of(decode_chat(json_encode({"model": "m", "messages": [last]}))) == trigger


def test_text_completion_has_the_trigger_other() -> None:
    assert trigger_of(decode_completion(b'{"model": "m", "prompt": "a"}')) == "other"
