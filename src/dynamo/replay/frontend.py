"""FrontendClient: send requests to a frontend over HTTP as streamed completions of token ids.

A block name of the trace always becomes the same token ids; the rest of a prompt is unique to the request.
"""

import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, DynamoException
from dynamo.replay.event_stream import EventStream
from dynamo.replay.load import ReplaySession, Turn
from dynamo.replay.online import AnswerChunk

REMEMBERED_MAX = 4096  # Blocks whose tokens are cached: 512 tokens each, some 20 MB.


class Prompts:
    """Token ids of block names."""

    def __init__(self, block_tokens: int, ids: range) -> None:
        if len(ids) < 2:
            raise ConfigError("--prompt-token-ids: expected LOW-HIGH, at least two ids")
        self._block_tokens = block_tokens
        self._ids = ids
        self._known: OrderedDict[int, list[int]] = OrderedDict()

    def tokens(self, hash_ids: Sequence[int], count: int) -> list[int]:
        """Return a prompt of `count` tokens."""
        found: list[int] = []
        for name in hash_ids:
            found += self._block(name)
            if len(found) >= count:
                break
        if len(found) < count:
            raise ConfigError(f"{len(hash_ids)} hash_ids do not cover a prompt of {count} tokens")
        del found[count:]
        return found

    def _block(self, name: int) -> list[int]:
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        made = random.Random(name).choices(self._ids, k=self._block_tokens)
        self._known[name] = made
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return made


class FrontendClient:
    """A client of `/v1/completions`."""

    def __init__(self, stream: EventStream, model: str, prompts: Prompts) -> None:
        self._stream = stream
        self._model = model
        self._prompts = prompts

    async def send(self, session: ReplaySession, turn: Turn) -> AsyncGenerator[AnswerChunk, None]:
        """Send one turn and yield the chunks of its answer."""
        headers = {"x-request-id": turn.request_id.replace("/", "-")}
        if len(session.turns) > 1:
            headers["x-dynamo-session-id"] = session.session_id
        answer = self._stream.post("/v1/completions", msgspec.json.encode(self.body(turn)), headers)
        async for data in answer:
            if data == b"[DONE]":
                continue
            chunk = parse_event(msgspec.json.decode(data))
            if chunk is not None:
                yield chunk

    def body(self, turn: Turn) -> dict[str, Any]:
        """Return the request body: exactly the turn's number of output tokens, ignoring stop tokens."""
        nvext: dict[str, Any] = {"extra_fields": ["worker_id"]}
        hints = {"priority": int(turn.priority), "strict_priority": turn.strict_priority}
        if any(hints.values()):
            nvext["agent_hints"] = {name: value for name, value in hints.items() if value}
        return {
            "model": self._model,
            "prompt": self._prompts.tokens(turn.hash_ids, turn.input_tokens),
            "max_tokens": turn.output_tokens,
            "min_tokens": turn.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "nvext": nvext,
        }


def parse_event(event: dict[str, Any]) -> AnswerChunk | None:
    """Parse an event. Raise `DynamoException` if it is an error."""
    if event.get("error"):
        raise DynamoException(str(event["error"].get("message", event["error"]))[:300])
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    worker = (event.get("nvext") or {}).get("worker_id") or {}
    tokens = 1 if event.get("choices") else 0
    chunk = AnswerChunk(
        tokens,
        usage.get("completion_tokens"),
        details.get("cached_tokens"),
        worker.get("decode_worker_id") if isinstance(worker, dict) else None,
    )
    return None if chunk == AnswerChunk(0) else chunk


async def only_model(stream: EventStream) -> str:
    """Return the only model that the frontend serves. Raise `ConfigError` if there is none or more than one."""
    try:
        listed = msgspec.json.decode(await stream.get("/v1/models"))
    except msgspec.DecodeError as error:
        raise ConfigError(f"--url: /v1/models: {error}") from None
    names = [str(one["id"]) for one in listed.get("data", [])]
    if len(names) != 1:
        raise ConfigError(f"--model-name is missing: the frontend serves {', '.join(names) or 'no model'}")
    return names[0]
