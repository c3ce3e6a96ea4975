"""Request trace payload: captures a response as it is written, and merges stream events into one response."""

import abc
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

KEPT_BYTES_MAX = 8 << 20  # Longer responses are not captured, to limit memory.

Fold = Callable[[Iterable[dict[str, Any]]], Any]
"""Merges the events of a stream into the whole response."""


class Capture(abc.ABC):
    """Copy of the bytes of one response, up to `KEPT_BYTES_MAX`; a longer response is dropped."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._is_too_long = False

    def keep(self, data: bytes) -> None:
        """Append to the copy."""
        if self._is_too_long:
            return
        self._kept += data
        if len(self._kept) > KEPT_BYTES_MAX:
            self._is_too_long = True
            self._kept.clear()

    @abc.abstractmethod
    def response(self, fold: Fold) -> Any:
        """Return the decoded response; None if it was dropped or never complete."""


class InternalCapture(Capture):
    """Copy of a response that is not sent over a socket: a whole body, or the events of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self._is_body = False

    def keep_body(self, body: bytes) -> None:
        """Keep a whole body."""
        self._is_body = True
        self.keep(body)

    def response(self, fold: Fold) -> Any:
        """See `Capture`."""
        if not self._kept:
            return None
        body = bytes(self._kept)
        return msgspec.json.decode(body) if self._is_body else fold(list(_events(body)))


class Tap(Capture):
    """Transport that captures the HTTP response written to it; installed only where payloads are traced."""

    def __init__(self, transport: Any) -> None:
        super().__init__()
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Write to the transport and keep a copy."""
        self._transport.write(data)
        self.keep(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def response(self, fold: Fold) -> Any:
        """See `Capture`."""
        head, found, body = bytes(self._kept).partition(b"\r\n\r\n")
        if not found:
            return None
        if b"text/event-stream" not in head:
            return msgspec.json.decode(body) if body else None
        events = list(_events(_unchunked(body)))
        return fold(events)


def last_response(events: Iterable[dict[str, Any]]) -> Any:
    """Return the whole response in the last event of an OpenAI responses stream."""
    for event in reversed(list(events)):
        if "response" in event:
            return event["response"]
    return None


def message_response(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the Anthropic message merged from its events."""
    message: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event.get("type")
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            _add_to_block(blocks[event["index"]], event["delta"])
        elif kind == "message_delta" and message is not None:
            message |= event["delta"]
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
    if message is None:
        return None
    return {**message, "content": [_closed(blocks[index]) for index in sorted(blocks)]}


def _add_to_block(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, text in delta.items():
        if name != "type":
            block[name] = (block.get(name) or "") + text


def _closed(block: dict[str, Any]) -> dict[str, Any]:
    """Return the block with its tool input decoded, which is streamed as pieces of JSON."""
    written = block.pop("partial_json", "")
    if not written:
        return block
    try:
        return {**block, "input": json.loads(written)}
    except ValueError:
        return {**block, "input": written}


def chat_response(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the chat completion merged from its chunks."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        whole = whole or {name: event.get(name) for name in ("id", "created", "model")}
        usage = event.get("usage") or usage
        for piece in event.get("choices") or ():
            _add(choices.setdefault(piece["index"], _empty_choice(piece["index"])), piece)
    if not whole:
        return None
    answer = {
        "id": whole["id"],
        "choices": [choices[index] for index in sorted(choices)],
        "created": whole["created"],
        "model": whole["model"],
        "object": "chat.completion",
    }
    return {**answer, "usage": usage} if usage else answer


def _empty_choice(index: int) -> dict[str, Any]:
    message = {"content": None, "refusal": None, "role": "assistant"}
    return {"index": index, "message": message, "finish_reason": None, "logprobs": None}


def _add(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    message, delta = choice["message"], piece.get("delta") or {}
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        _add_call(message.setdefault("tool_calls", []), call)
    choice["finish_reason"] = piece.get("finish_reason") or choice["finish_reason"]
    logprobs = piece.get("logprobs")
    if logprobs:
        known = choice["logprobs"] or {"content": []}
        choice["logprobs"] = {**logprobs, "content": [*known["content"], *(logprobs.get("content") or ())]}


def _add_call(calls: list[dict[str, Any]], piece: Mapping[str, Any]) -> None:
    index = piece.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"function": {"name": "", "arguments": ""}})
    call = calls[index]
    for name, value in piece.items():
        if name == "function":
            for part, text in value.items():
                call["function"][part] = (call["function"].get(part) or "") + (text or "")
        elif name != "index":
            call[name] = value


def _unchunked(body: bytes) -> bytes:
    """Return the data of a chunked body."""
    data, place = bytearray(), 0
    while True:
        end = body.find(b"\r\n", place)
        if end < 0:
            return bytes(data)
        size = int(body[place:end], 16)
        if size == 0:
            return bytes(data)
        data += body[end + 2 : end + 2 + size]
        place = end + 2 + size + 2


def _events(text: bytes) -> Iterable[dict[str, Any]]:
    """Return the JSON objects of a stream of server-sent events."""
    for line in text.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
