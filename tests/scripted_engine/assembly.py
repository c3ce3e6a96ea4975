"""Assembly of a stream's chunks into the form of a non-streaming response."""

from collections.abc import Sequence
from typing import Any


def chat_of(events: Sequence[Any]) -> dict[str, Any]:
    """Return the `chat.completion` of chat chunks, without the fields that differ between responses."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for chunk in event["choices"]:
            _add(choices, chunk)
    for choice in choices.values():
        message = choice["message"]
        calls = message.pop("tool_calls")
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        choice["message"] = {key: value for key, value in message.items() if value is not None}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _add(choices: dict[int, dict[str, Any]], chunk: Any) -> None:
    choice = choices.setdefault(
        chunk["index"],
        {"index": chunk["index"], "message": {"tool_calls": {}}, "finish_reason": None, "logprobs": None},
    )
    assert choice["finish_reason"] is None, "nothing follows the reason"
    delta, message = chunk["delta"], choice["message"]
    for key in ("content", "reasoning_content", "reasoning"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    message["role"] = delta.get("role") or message.get("role")
    for part in delta.get("tool_calls", ()):
        call = message["tool_calls"].setdefault(part["index"], {"type": "function", "name": "", "arguments": ""})
        call["name"] += part["function"].get("name") or ""
        call["arguments"] += part["function"].get("arguments") or ""
        assert ("id" in part) == ("name" in part["function"]), "a call's first part names it, and no other"
    if chunk["logprobs"] is not None:
        before = (choice["logprobs"] or {"content": []})["content"]
        choice["logprobs"] = {"content": [*before, *chunk["logprobs"]["content"]], "refusal": None}
    choice["finish_reason"] = chunk["finish_reason"]


def plain(answer: Any) -> dict[str, Any]:
    """Return a `chat.completion` without the fields that differ between responses."""
    choices = []
    for choice in answer["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = [{"type": call["type"], **call["function"]} for call in message["tool_calls"]]
        choices.append({**choice, "message": message})
    return {"choices": choices, "usage": answer["usage"]}


def text_of(events: Sequence[Any]) -> dict[str, Any]:
    """Return the `text_completion` of its chunks."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event["usage"] or usage
        for chunk in event["choices"]:
            choice = choices.setdefault(
                chunk["index"], {"text": "", "index": chunk["index"], "finish_reason": None, "logprobs": None}
            )
            choice["text"] += chunk["text"]
            choice["finish_reason"] = chunk["finish_reason"] or choice["finish_reason"]
            if chunk["logprobs"] is not None:
                before = choice["logprobs"] or {key: [] for key in chunk["logprobs"]}
                choice["logprobs"] = {key: [*before[key], *chunk["logprobs"][key]] for key in before}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
