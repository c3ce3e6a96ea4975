"""Simulated clients: requests whose responses are predictable, and the bytes received for them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.engine import CONTEXT_LENGTH, Language

from dynamo.http.server.exchange import Exchange

STATUSES = {404, 499, 503, 504, 529}
"""Statuses allowed for a request that fails because of a fault; 500 would be a bug."""


class Wire:
    """Transport and protocol of one HTTP request, which record the written bytes."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = headers
        self.transport = self
        self.exchanges: set[Exchange] = set()
        self.is_stalled = False
        self.turns = None
        self.fd = -1
        self.data = bytearray()
        self.on_complete: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        self.data += data

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def on_response_complete(self) -> None:
        self.on_complete()


class SimExchange(Exchange):
    """Production exchange over a simulated wire; it counts the ends of its response."""

    def __init__(self, wire: Wire, body: bytes) -> None:
        super().__init__(wire, lambda _: None, keep_alive=True)  # type: ignore[arg-type]
        self.body = bytearray(body)
        self.ends = 0
        self.sent: SentRequest

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        self.ends += 1
        super().respond(status, body, content_type)

    def end(self, data: bytes = b"") -> None:
        self.ends += 1
        super().end(data)


@dataclass
class PlannedRequest:
    """Request that a client will send."""

    id: str
    frontend: int
    model: str
    at_s: float
    is_chat: bool
    body: dict[str, Any]
    leaves_after_s: float | None
    is_probe: bool = False


@dataclass
class SentRequest:
    """Request in flight, and its progress."""

    plan: PlannedRequest
    exchange: SimExchange
    wire: Wire
    frontend: Any
    """Frontend that received the request."""
    sent_s: float
    ended_s: float | None = None
    last_output_s: float = 0.0
    """Time at which the newest message of its response reached the frontend."""
    left_s: float | None = None
    parts: dict[str, list[int]] = field(default_factory=dict)
    """Instances to which each engine request was sent, in order, by request id."""
    failed_s: dict[str, float] = field(default_factory=dict)
    """Time at which a part's worker failed, until the part is sent again to a prefill or decode worker."""
    prefilled_s: dict[str, float] = field(default_factory=dict)
    """Time at which a part was last sent to a prefill worker."""
    whole: set[str] = field(default_factory=set)
    """Parts whose responses are complete."""
    resumed: int = 0
    """Number of times that a part was sent again after its first token."""

    @property
    def over_s(self) -> float | None:
        """Time at which the client received the complete response or disconnected."""
        return self.ended_s if self.ended_s is not None else self.left_s

    @property
    def label(self) -> str:
        return f"request {self.plan.id[-4:]}"


@dataclass
class ReceivedResponse:
    """Response that a client received."""

    status: int
    is_complete: bool
    """Whether the HTTP message is complete."""
    texts: dict[int, str]
    finishes: dict[int, list[str]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    dones: int
    ids: set[str]


def read(wire: Wire) -> ReceivedResponse:
    """Parse the bytes that production code wrote, strictly."""
    response = ReceivedResponse(0, False, {}, {}, None, None, 0, set())
    data = bytes(wire.data)
    if not data:
        return response
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    response.status = int(lines[0].split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    if b"content-length" in headers:
        assert len(rest) == int(headers[b"content-length"]), "a body of another length than declared"
        response.is_complete = True
        _read_whole(response, json.loads(rest))
        return response
    body, response.is_complete = _unchunk(rest)
    for event in body.split("\n\n")[:-1]:
        assert event.startswith("data: "), f"not an event: {event!r}"
        if event == "data: [DONE]":
            response.dones += 1
            continue
        assert not response.dones, "an event after [DONE]"
        _read_event(response, json.loads(event[6:]))
    return response


def _unchunk(rest: bytes) -> tuple[str, bool]:
    parts: list[bytes] = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            assert rest == b"\r\n", f"bytes after the last chunk: {rest!r}"
            return b"".join(parts).decode(), True
        assert rest[count : count + 2] == b"\r\n", "a chunk of another length than declared"
        parts.append(rest[:count])
        rest = rest[count + 2 :]
    return b"".join(parts).decode(), False


def _read_whole(response: ReceivedResponse, value: dict[str, Any]) -> None:
    response.error = value.get("error")
    for choice in value.get("choices", ()):
        message = choice.get("message")
        response.texts[choice["index"]] = (message["content"] or "") if message is not None else choice["text"]
        response.finishes.setdefault(choice["index"], []).append(choice["finish_reason"])
    response.usage = value.get("usage")


def _read_event(response: ReceivedResponse, value: dict[str, Any]) -> None:
    if "error" in value:
        assert response.error is None, "two errors"
        response.error = value["error"]
        return
    response.ids.add(value["id"])
    if value.get("usage") is not None:
        response.usage = value["usage"]
    for choice in value["choices"]:
        index = choice["index"]
        delta = choice.get("delta")
        text = (delta.get("content") or "") if delta is not None else choice["text"]
        if text:
            assert index not in response.finishes, "text after the end of its choice"
        response.texts[index] = response.texts.get(index, "") + text
        if choice.get("finish_reason") is not None:
            response.finishes.setdefault(index, []).append(choice["finish_reason"])


@dataclass
class ExpectedResponse:
    """Response that a successful request must return."""

    texts: dict[int, str]
    finishes: dict[int, str]
    prompt_tokens: int
    completion_tokens: int


def expect(plan: PlannedRequest, language: Language, prompts: list[list[int]]) -> ExpectedResponse:
    """Return the expected response, computed from the token model alone."""
    body = plan.body
    expected = ExpectedResponse({}, {}, sum(map(len, prompts)), 0)
    count = body.get("n", 1)
    for place, prompt in enumerate(prompts):
        limit = min(body["max_tokens"], CONTEXT_LENGTH - len(prompt))
        for number in range(count):
            tokens = language.generate_all(prompt, limit, body.get("min_tokens", 0), number)
            text, finish = language.text(tokens), "stop" if tokens[-1] == language.eos else "length"
            stop = body.get("stop")
            if stop is not None and stop[0] in text:
                used = next(k for k in range(1, len(tokens) + 1) if stop[0] in language.text(tokens[:k]))
                text, finish, tokens = text[: text.index(stop[0])], "stop", tokens[:used]
            index = place * count + number
            expected.texts[index], expected.finishes[index] = text, finish
            expected.completion_tokens += len(tokens)
    return expected


def draw_body(rng: random.Random, language: Language, model: str, *, is_chat: bool) -> dict[str, Any]:
    """Draw a request body."""
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice((1, 2, 5, 12, 30, 60, 60)), "temperature": 0}
    prompts = [[rng.randrange(256, 1500) for _ in range(rng.randint(1, 12))]]
    if is_chat:
        words = " ".join(rng.choice(("how", "many", "workers", "does", "it", "take")) for _ in range(rng.randint(1, 9)))
        body["messages"] = [{"role": "user", "content": words}]
    elif rng.random() < 0.1:
        prompts.append([rng.randrange(256, 1500) for _ in range(rng.randint(1, 12))])
        body["prompt"] = prompts
    else:
        body["prompt"] = prompts[0]
    if rng.random() < 0.75:
        body["stream"] = True
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.2:
                body["stream_options"]["continuous_usage_stats"] = True
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.5:
        body["min_tokens"] = rng.randint(1, body["max_tokens"])
    if not is_chat and len(prompts) == 1 and rng.random() < 0.2:
        text = language.text(language.generate_all(prompts[0], body["max_tokens"]))
        if text.isascii() and len(text) > 4:
            at = rng.randrange(len(text) - 3)
            body["stop"] = [text[at : at + 3]]
    return body
