"""Invalid requests for every group of routes: their status, and the field that the error names."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

EMBEDDER = "e"
USER: Any = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CLAUDE_TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
LONG = "long " * 4000
DEEP = b'{"model":"m","tools":[{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"

REQUESTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/embeddings": {"model": EMBEDDER, "input": "Hi"},
    "/v1/classify": {"model": MODEL, "input": "Hi"},
    "/v1/pooling": {"model": MODEL, "input": "Hi"},
    "/v1/rerank": {"model": MODEL, "query": "Hi", "documents": ["a"]},
    "/v1/images/generations": {"model": MODEL, "prompt": "Hi"},
    "/v1/images/edits": {"model": MODEL, "prompt": "Hi", "input_reference": "data:image/png;base64,AAAA"},
    "/v1/audio/speech": {"model": MODEL, "input": "Hi"},
    "/v1/videos": {"model": MODEL, "prompt": "Hi"},
    "/v1/videos/stream": {"model": MODEL, "prompt": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {"model": MODEL, "max_tokens": 8, "messages": USER},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
    "/busy_threshold": {"model": MODEL},
}
"""Valid request for each path with a body."""
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
WRONG_TYPE_STATUS = {"/busy_threshold": 422}
"""Status of a field or body of a wrong type, where it is not 400."""
PARAMS: dict[str, None] = dict.fromkeys(("/busy_threshold", *ANTHROPIC))
"""Paths whose errors have no `param`."""
ANTHROPIC_KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}


@dataclass(frozen=True)
class Bad:
    """Request that is refused."""

    path: str
    name: str
    body: Any
    says: str
    """Part of the error message."""
    param: str | None = None
    """Value of `param`, where the error has one."""
    status: int = 400
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path}: {self.name}"


def wrong(path: str, name: str, says: str, param: str | None = None, status: int = 400, /, **fields: Any) -> Bad:
    """Return a valid request with these changes; a field with the value `...` is removed."""
    body = {key: value for key, value in {**REQUESTED[path], **fields}.items() if value is not ...}
    return Bad(path, name, body, says, param, status)


def chat(name: str, says: str, param: str | None = None, status: int = 400, /, **fields: Any) -> Bad:
    return wrong("/v1/chat/completions", name, says, param, status, **fields)


def spoken(name: str, says: str, param: str, *messages: Any) -> Bad:
    return chat(name, says, param, messages=list(messages))


def part(name: str, says: str, param: str, value: Any) -> Bad:
    return spoken(name, says, param, {"role": "user", "content": [value]})


def text(name: str, says: str, param: str | None = None, status: int = 400, /, **fields: Any) -> Bad:
    return wrong("/v1/completions", name, says, param, status, **fields)


def embed(name: str, says: str, param: str | None = None, status: int = 400, /, **fields: Any) -> Bad:
    return wrong("/v1/embeddings", name, says, param, status, **fields)


def respond(name: str, says: str, param: str | None = None, status: int = 400, /, **fields: Any) -> Bad:
    return wrong("/v1/responses", name, says, param, status, **fields)


def claude(name: str, says: str, status: int = 400, /, **fields: Any) -> Bad:
    return wrong("/v1/messages", name, says, None, status, **fields)


BODIES = [
    Bad(path, name, raw, says, status=WRONG_TYPE_STATUS.get(path, 400) if name == "a list" else 400)
    for path in REQUESTED
    for name, raw, says in (
        ("an empty body", b"", "truncated"),
        ("half a body", b'{"model": "m"', "truncated"),
        ("no JSON", b"{nope", "malformed"),
        ("a list", b"[]", "object"),
        ("Latin-1", '{"model":"é"}'.encode("latin-1"), "utf-8"),
    )
]
MODELS = [
    wrong(path, "an unknown model", "no-such-model", PARAMS.get(path, "model"), 404, model="no-such-model")
    for path in REQUESTED
]
MODEL_TYPES = [
    wrong(path, "a model of no name", "model", PARAMS.get(path, "model"), WRONG_TYPE_STATUS.get(path, 400), model=7)
    for path in REQUESTED
]
CHAT = [
    Bad("/v1/chat/completions", "a deep body", DEEP, "deep"),
    chat("no model", "model", "model", model=...),
    chat("no messages", "messages", "messages", messages=...),
    chat("an empty conversation", "messages", "messages", messages=[]),
    spoken("an unknown role", "wizard", "messages[0].role", {"role": "wizard", "content": "x"}),
    spoken("a message without a role", "role", "messages[0]", {"content": "x"}),
    spoken("a user who says nothing", "content", "messages[0].content", {"role": "user"}),
    spoken("a number for a text", "content", "messages[0].content", {"role": "user", "content": 7}),
    spoken("a tool's answer to no call", "tool_call_id", "messages[0].tool_call_id", {"role": "tool", "content": "x"}),
    part("a part of an unknown type", "smell", "messages[0].content[0]", {"type": "smell"}),
    part("an image without its address", "image_url", "messages[0].content[0]", {"type": "image_url"}),
    part("a text part without text", "text", "messages[0].content[0]", {"type": "text"}),
    chat("an unknown field", "surprise", "surprise", surprise=1),
    chat("a text for a number", "max_tokens", "max_tokens", max_tokens="four"),
    chat("no tokens", "max tokens", "max_tokens", max_tokens=0),
    chat("fewer than no tokens", "tokens", "max_completion_tokens", max_completion_tokens=-1),
    chat("more tokens than there are numbers", "max_tokens", "max_tokens", max_tokens=10**30),
    chat("a hot temperature", "temperature", "temperature", temperature=2.5),
    chat("a cold temperature", "temperature", "temperature", temperature=-1),
    chat("a large top_p", "top_p", "top_p", top_p=1.5),
    chat("a top_k of a text", "top_k", "top_k", top_k="many"),
    chat("a min_p over one", "min_p", "min_p", min_p=2),
    chat("too much presence", "presence penalty", "presence_penalty", presence_penalty=3),
    chat("too much frequency", "frequency penalty", "frequency_penalty", frequency_penalty=-3),
    chat("no choices", "n", "n", n=0),
    chat("too many choices", "n", "n", n=1000),
    chat("too many alternatives", "top_logprobs", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("alternatives without logprobs", "logprobs", "top_logprobs", top_logprobs=2),
    chat("too many stops", "stop", "stop", stop=[str(number) for number in range(33)]),
    chat("a number for a stop", "stop", "stop", stop=7),
    chat("an unknown way to stream", "stream", "stream", stream="yes"),
    chat("stream options without a stream", "stream_options", "stream_options", stream_options={"include_usage": True}),
    chat("a biased word", "logit_bias", "logit_bias", logit_bias={"word": 1}),
    chat("too large a bias", "logit bias", "logit_bias", logit_bias={"1": 1000}),
    chat("a choice of tools without tools", "tool_choice", "tool_choice", tool_choice="required"),
    chat("a tool that is not there", "absent", "tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "absent"}}),
    chat("an unknown tool choice", "tool_choice", "tool_choice", tools=[TOOL], tool_choice="sometimes"),
    chat("a tool of an unknown type", "tools", "tools[0]", tools=[{"type": "hammer"}]),
    chat("a tool without a name", "name", "tools[0].function.name", tools=[{"type": "function", "function": {}}]),
    chat("an unknown response format", "poem", "response_format.type", response_format={"type": "poem"}),
    chat("a schema format without a schema", "json_schema", "response_format.json_schema", response_format={"type": "json_schema"}),
    chat("two constraints at once", "guided", None, guided_regex="a", guided_choice=["a"]),
    chat("functions of old", "functions", None, 501, functions=[{"name": "look"}]),
    chat("a call of old", "function_call", None, 501, function_call="auto"),
    chat("a sound", "audio", "audio", modalities=["audio"], audio={"voice": "alloy", "format": "wav"}),
    chat("an unknown field of nvext", "surprise", "nvext", nvext={"surprise": 1}),
    chat("a wrong type in nvext", "dp_rank", "nvext.dp_rank", nvext={"dp_rank": "first"}),
    chat("a prompt over the context", "2048", "messages", messages=[{"role": "user", "content": LONG}]),
    chat("a seed of a text", "seed", "seed", seed="lucky"),
]  # fmt: skip
TEXT = [
    text("no prompt", "prompt", "prompt", prompt=...),
    text("an empty list of prompts", "prompt", "prompt", prompt=[]),
    text("an object for a prompt", "prompt", "prompt", prompt={"text": "Hi"}),
    text("a mixed prompt", "prompt", "prompt", prompt=["a", 1]),
    text("a token that is none", "token id", "prompt", prompt=[-1]),
    text("too many alternatives", "logprobs", "logprobs", logprobs=50),
    text("a best below n", "best_of", "best_of", n=4, best_of=2),
    text("a suffix", "suffix", "suffix", suffix="end"),
    text("an unknown field", "surprise", "surprise", surprise=1),
    text("no tokens", "max_tokens", "max_tokens", max_tokens=-5),
    text("a prompt over the context", "2048", "prompt", prompt=LONG),
    text("an echo of a text", "echo", "echo", echo="yes"),
]
EMBEDDINGS = [
    embed("no input", "input", "input", input=...),
    embed("an empty list", "input", "input", input=[]),
    embed("an object", "input", "input", input={"text": "Hi"}),
    embed("a negative token", "input", "input", input=[-1]),
    embed("too many inputs", "2048", "input", input=["a"] * 2049),
    embed("an input over the context", "2048", "input", input=LONG),
    embed("no dimensions", "dimensions", "dimensions", dimensions=0),
    embed("an unknown encoding", "encoding_format", "encoding_format", encoding_format="hex"),
    embed("a number beyond numbers", "out of range", truncate_prompt_tokens=10**30),
    embed("an unknown field", "surprise", "surprise", surprise=1),
    wrong("/v1/embeddings", "a model that writes", MODEL, "model", 404, model=MODEL),
    wrong("/v1/chat/completions", "a model that only embeds", EMBEDDER, "model", 404, model=EMBEDDER),
    wrong("/v1/rerank", "an empty query", "Query", "query", query=" "),
    wrong("/v1/rerank", "no documents", "Documents", "documents", documents=[]),
    wrong("/v1/rerank", "fewer than one", "top_n", "top_n", top_n=0),
]
MEDIA = [
    wrong("/v1/images/generations", "no prompt", "prompt", "prompt", prompt=...),
    wrong("/v1/images/generations", "a number of a text", "n", "n", n="two"),
    wrong("/v1/images/edits", "no image", "input_reference", "input_reference", input_reference=...),
    wrong("/v1/audio/speech", "no text", "input", "input", input=...),
    wrong("/v1/audio/speech", "a speed beyond speech", "speed", "speed", speed=100),
    wrong("/v1/videos", "no prompt", "prompt", "prompt", prompt=...),
    wrong("/v1/videos/stream", "a prompt of a number", "prompt", "prompt", prompt=7),
]
RESPONSES = [
    respond("no input", "input", "input", input=...),
    respond("an empty list", "input", "input", input=[]),
    respond("an item of an unknown type", "smell", "input[0].type", input=[{"type": "smell"}]),
    respond("an unknown role", "wizard", "input[0].role", input=[{"role": "wizard", "content": "x"}]),
    respond("a file", "input_file", "input[0].content[0].type", input=[{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]),
    respond("a job for later", "background", "background", background=True),
    respond("a hot temperature", "temperature", "temperature", temperature=3),
    respond("no tokens", "tokens", "max_output_tokens", max_output_tokens=0),
    respond("a hosted tool", "web_search", "tools[0].type", tools=[{"type": "web_search"}]),
    respond("an unknown field", "bogus", "bogus", bogus=1),
    respond("an answer that is not kept", "resp_1", "previous_response_id", 404, previous_response_id="resp_1"),
    respond("an unknown truncation", "truncation", "truncation", truncation="middle"),
    respond("an input over the context", "2048", "input", input=LONG),
    respond("an unknown format", "poem", "text.format.type", text={"format": {"type": "poem"}}),
    wrong("/v1/responses/input_tokens", "no input", "input", "input", input=...),
    Bad("/v1/responses/resp_1", "a response that is not kept", None, "resp_1", None, 404, "GET"),
    Bad("/v1/responses/resp_1", "a response that is not kept", None, "resp_1", None, 404, "DELETE"),
    Bad("/v1/responses/resp_1/input_items", "a response that is not kept", None, "resp_1", None, 404, "GET"),
    Bad("/v1/responses/resp_1/input_items?limit=x", "a page of no number", None, "limit", "limit", 400, "GET"),
    Bad("/v1/responses/resp_1?stream=true", "a kept response as a stream", None, "stream", "stream", 400, "GET"),
]  # fmt: skip
MESSAGES = [
    claude("no limit", "max_tokens", max_tokens=...),
    claude("no tokens", "max tokens", max_tokens=0),
    claude("no messages", "messages", messages=...),
    claude("an empty conversation", "messages", messages=[]),
    claude("an unknown role", "messages[0].role", messages=[{"role": "wizard", "content": "x"}]),
    claude("a block of an unknown type", "smell", messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    claude("a hot temperature", "temperature", temperature=3),
    claude("a large top_p", "top_p", top_p=2),
    claude("a tool without a schema", "input_schema", tools=[{"name": "look"}]),
    claude("a tool that is not there", "absent", tools=[CLAUDE_TOOL], tool_choice={"type": "tool", "name": "absent"}),
    claude("an unknown tool choice", "sometimes", tools=[CLAUDE_TOOL], tool_choice={"type": "sometimes"}),
    claude("thoughts without their budget", "budget_tokens", thinking={"type": "enabled"}),
    claude("an unknown field", "surprise", surprise=1),
    claude("a prompt over the context", "2048", messages=[{"role": "user", "content": LONG}]),
    claude("a number for a system prompt", "system", system=7),
    wrong("/v1/messages/count_tokens", "no messages", "messages", messages=...),
]
OTHERS = [
    Bad("/nowhere", "an unknown route", None, "GET /nowhere", None, 404, "GET"),
    Bad("/nowhere", "an unknown route", {}, "POST /nowhere", None, 404),
    Bad("/v1/chat/completions/", "a slash too many", REQUESTED["/v1/chat/completions"], "/v1/chat/completions/", None, 404),
    *(Bad(path, "a wrong method", None, f"GET is not allowed on {path}", None, 405, "GET") for path in REQUESTED if path not in ("/busy_threshold", "/v1/responses", "/v1/responses/input_tokens")),
    Bad("/v1/models", "a wrong method", {}, "POST is not allowed on /v1/models", None, 405),
    Bad("/health", "a wrong method", {}, "POST is not allowed on /health", None, 405),
    Bad("/v1/chat/completions", "a wrong method", None, "PATCH is not allowed", None, 405, "PATCH"),
    Bad("/v1/models/no-such-model", "an unknown model", None, "no-such-model", "model", 404, "GET"),
    Bad("/v1/models/no-such-model/ready", "an unknown model", None, "no-such-model", "model", 404, "GET"),
    Bad("/routing/decisions?limit=0", "a limit of nothing", None, "limit", "limit", 400, "GET"),
    Bad("/routing/decisions?limit=x", "a limit of a text", None, "limit", "limit", 400, "GET"),
    Bad("/routing/decisions?model=m", "a model that is not routed by its cache", None, "'m'", "model", 404, "GET"),
    wrong("/busy_threshold", "a share over one", "active_decode_blocks_threshold", active_decode_blocks_threshold=1.5),
    wrong("/busy_threshold", "a number below zero", "active_prefill_tokens_threshold", None, 422, active_prefill_tokens_threshold=-1),
]  # fmt: skip
BATCH: dict[str, Any] = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
BATCHES = [
    Bad("/v1/batches", "no file", {**BATCH, "input_file_id": None}, "input_file_id", "input_file_id"),
    Bad("/v1/batches", "an unknown file", BATCH, "file-1", None, 404),
    Bad("/v1/batches", "an unknown endpoint", {**BATCH, "endpoint": "/v1/nowhere"}, "endpoint", "endpoint"),
    Bad(
        "/v1/batches", "another window", {**BATCH, "completion_window": "1h"}, "completion_window", "completion_window"
    ),
    Bad("/v1/batches", "an unknown field", {**BATCH, "surprise": 1}, "surprise", "surprise"),
    Bad("/v1/batches", "no JSON", b"{nope", "malformed"),
    Bad("/v1/batches/batch_1", "an unknown batch", None, "batch_1", None, 404, "GET"),
    Bad("/v1/batches/batch_1/cancel", "an unknown batch", None, "batch_1", None, 404),
    Bad("/v1/batches?limit=x", "a page of no number", None, "limit", "limit", 400, "GET"),
    Bad("/v1/files", "no form", b"{}", "multipart", None),
    Bad("/v1/files/file-1", "an unknown file", None, "file-1", None, 404, "GET"),
    Bad("/v1/files/file-1", "an unknown file", None, "file-1", None, 404, "DELETE"),
    Bad("/v1/files/file-1/content", "an unknown file", None, "file-1", None, 404, "GET"),
    Bad("/v1/files?limit=0", "a page of nothing", None, "limit", "limit", 400, "GET"),
    Bad("/v1/files?order=up", "an unknown order", None, "order", "order", 400, "GET"),
    Bad("/v1/realtime", "no WebSocket", None, "upgrade", None, 400, "GET"),
]
HEADERS = [
    Bad("/v1/chat/completions", f"{name}: {value}", REQUESTED["/v1/chat/completions"], "not a worker of model", "nvext.backend_instance_id", headers={name: value})
    for name, value in (("x-dynamo-worker-instance-id", "12345"), ("x-worker-instance-id", "12345"))
]  # fmt: skip
ALL = [
    *BODIES,
    *MODELS,
    *MODEL_TYPES,
    *CHAT,
    *TEXT,
    *EMBEDDINGS,
    *MEDIA,
    *RESPONSES,
    *MESSAGES,
    *OTHERS,
    *BATCHES,
    *HEADERS,
]
assert len(ALL) >= 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a frontend, a worker that generates, and one that embeds."""
    folder = tmp_path_factory.mktemp("bad")
    with Cluster(folder, "--enable-anthropic-api", "--batch-dir", str(folder / "batches")) as cluster:
        cluster.scripted_worker()
        cluster.run("cpu", "--model-name", EMBEDDER, "--embedding-worker")
        wait_until(lambda: cluster.workers() == 2, "the second worker never appeared")
        yield cluster


def error_of(bad: Bad, answer: Any) -> tuple[str, Any]:
    """Return the message and `param` of an error, in the format of its route."""
    if bad.path == "/busy_threshold" and bad.method == "POST":
        return answer["error"], None
    if bad.path in ANTHROPIC and bad.status != 405:
        assert answer["type"] == "error"
        assert answer["error"]["type"] == ANTHROPIC_KINDS[bad.status]
        return answer["error"]["message"], None
    error = answer["error"]
    assert error["message"] == answer["message"]
    assert answer["code"] == bad.status
    return error["message"], error["param"]


@pytest.mark.parametrize("bad", ALL, ids=str)
def test_bad_request_returns_an_error_that_names_the_problem(cluster: Cluster, bad: Bad) -> None:
    content = bad.body if isinstance(bad.body, bytes | None) else json.dumps(bad.body).encode()
    answer = cluster.http.request(bad.method, bad.path, content=content, headers=bad.headers)
    assert answer.status_code == bad.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    message, param = error_of(bad, answer.json())
    assert bad.says.casefold() in message.casefold(), message
    if bad.param is not None:
        assert param == bad.param, answer.text


@pytest.mark.parametrize("path", [path for path in REQUESTED if not path.startswith(("/v1/images", "/v1/audio", "/v1/videos", "/v1/classify", "/v1/pooling", "/v1/rerank"))])  # fmt: skip
def test_unmodified_request_of_each_case_is_valid(cluster: Cluster, path: str) -> None:
    assert cluster.post(REQUESTED[path], path).status_code == 200
