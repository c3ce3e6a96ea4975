"""Text models: a worker's own chunks, passed on or folded into one response."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo.core.codec import json_encode, msgpack_decode, msgpack_encode
from dynamo.core.errors import Disconnected, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionUsage
from dynamo.protocols.openai import decode_chat
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.endpoints import CHAT
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.postprocessor import FinishedChoice
from dynamo.serving.request_state import RequestState
from dynamo.serving.text_models import ChatShape, CompletionShape, TextAnswer, TextWriter, rewritten


class Client:
    """An exchange's outside."""

    def __init__(self) -> None:
        self.body = json_encode({"model": "m", "stream": True})
        self.writes: list[bytes] = []
        self.status: int | None = None
        self.response_started = False
        self.is_ended = False
        self.disconnected = False
        self.on_disconnect: Any = None

    def write(self, data: bytes) -> None:
        self.response_started = True
        self.writes.append(data)

    def end(self, data: bytes = b"") -> None:
        self.write(data)
        self.is_ended = True

    def respond(self, status: int, body: bytes) -> None:
        self.status = status
        self.end(body)

    def refuse(self, error: Any) -> None:
        self.respond(error.status, error.body())


class FakeCall:
    def __init__(self, instance_id: int, output: list[str]) -> None:
        self.instance_id = instance_id
        self.outputs = output

    def stop(self) -> None:
        self.outputs.append("stop")

    def kill(self) -> None:
        self.outputs.append(f"kill {self.instance_id}")


class FakeModel:
    """Workers 1, 2, … that take requests in turn."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.outputs: list[str] = []
        self.sent: list[dict[str, Any]] = []

    async def send(self, body: bytes, receiver: Any, *, exclude: frozenset[int], **how: Any) -> FakeCall:
        left = [worker for worker in range(1, self.workers + 1) if worker not in exclude]
        if not left:
            raise WorkerUnavailable("no instance can take the request")
        self.sent.append({"request": msgpack_decode(body), "worker": left[0], **how})
        return FakeCall(left[0], self.outputs)


class Scene:
    def __init__(self, *, stream: bool = True, workers: int = 1, endpoint: str = "chat_completions") -> None:
        self.client: Any = Client()
        self.model: Any = FakeModel(workers)
        self.tasks = TaskOwner("test")
        self.closed: list[str] = []
        record = RequestState(
            FrontendMetrics(MetricsRegistry()),
            endpoint,
            "m",
            stream=stream,
            started_s=0,
            request_id="r",
            headers={"traceparent": "t"},
            metadata={"tenant": "x"},
        )
        self.answer = TextAnswer(
            self.client, record, lambda answer, label, error: self.closed.append(label),
            model=self.model, name="m", tasks=self.tasks,
        )  # fmt: skip

    async def forward(self) -> "Scene":
        await self.answer.forward()
        return self

    def receive_event(self, *chunks: Any) -> None:
        for chunk in chunks:
            self.answer.on_item(Item(msgpack_encode(chunk)))


def chat(content: str | None = None, finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    if content is not None:
        delta["content"] = content
    return {
        "id": "i",
        "created": 5,
        "model": "w",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }


async def test_text_worker_receives_the_request_of_the_client_unchanged() -> None:
    scene = await Scene().forward()
    assert scene.model.sent == [
        {
            "request": {"model": "m", "stream": True}, "worker": 1, "request_id": "r", "instance_id": None,
            "headers": {"traceparent": "t"}, "metadata": {"tenant": "x"},
        }
    ]  # fmt: skip


async def test_request_is_sent_to_the_chosen_worker() -> None:
    scene = Scene()
    await scene.answer.forward(7)
    assert scene.model.sent[0]["instance_id"] == 7


async def test_text_stream_chunks_are_forwarded_at_once() -> None:
    scene = await Scene().forward()
    scene.receive_event(chat("Hello ", role="assistant"))
    (event,) = scene.client.writes
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == {
        **chat("Hello ", role="assistant"), "object": "chat.completion.chunk",
    }  # fmt: skip
    scene.answer.on_item(Item(None, event="ping"))
    scene.answer.on_end()
    assert scene.client.writes[1:] == [b"data: [DONE]\n\n"]
    assert scene.closed == [""]


async def test_text_chunks_are_merged_into_one_unary_response() -> None:
    scene = await Scene(stream=False).forward()
    scene.receive_event(chat("Hello ", role="assistant"), {**chat("you", "stop"), "usage": {"total_tokens": 3}})
    assert scene.client.writes == []
    scene.answer.on_end()
    assert json.loads(scene.client.writes[0]) == {
        "id": "i",
        "choices": [
            {
                "index": 0, "message": {"content": "Hello you", "refusal": None, "role": "assistant"},
                "finish_reason": "stop", "logprobs": None,
            }
        ],
        "created": 5, "model": "w", "object": "chat.completion", "usage": {"total_tokens": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    "chunk",
    [5, None, {}, {"foo": 1}, {"choices": [{}]}, {"choices": [5]}, {"choices": [{"message": {"content": "x"}}]}],
)
async def test_malformed_text_chunk_is_an_internal_error(chunk: Any) -> None:
    scene = await Scene(stream=False).forward()
    scene.receive_event(chunk)
    assert scene.client.status == 500
    assert scene.closed == ["internal"]
    assert scene.model.outputs == ["kill 1"]


async def test_plain_token_from_a_text_worker_is_an_error() -> None:
    scene = await Scene(stream=False).forward()
    scene.answer.on_token(5)
    assert scene.client.status == 500


async def test_text_stream_without_a_chunk_is_unavailable() -> None:
    scene = await Scene().forward()
    scene.answer.on_end()
    assert scene.client.status == 503


async def test_failure_before_the_first_chunk_retries_another_worker() -> None:
    scene = await Scene(workers=2).forward()
    scene.answer.on_error(Disconnected("gone"))
    assert await scene.tasks.wait(1.0)
    assert [sent["worker"] for sent in scene.model.sent] == [1, 2]
    scene.receive_event(chat("hi", "stop"))
    scene.answer.on_end()
    assert scene.closed == [""]


async def test_whole_text_response_starts_over_after_a_failure() -> None:
    scene = await Scene(stream=False, workers=2).forward()
    scene.receive_event(chat("half of a"))
    scene.answer.on_error(Disconnected("gone"))
    assert await scene.tasks.wait(1.0)
    assert [sent["worker"] for sent in scene.model.sent] == [1, 2]
    scene.receive_event(chat("a whole one", "stop"))
    scene.answer.on_end()
    assert json.loads(scene.client.writes[0])["choices"][0]["message"]["content"] == "a whole one"
    assert scene.closed == [""]


async def test_failure_is_returned_without_another_worker() -> None:
    scene = await Scene().forward()
    scene.answer.on_error(Disconnected("gone"))
    assert await scene.tasks.wait(1.0)
    assert (scene.client.status, scene.closed) == (503, ["unavailable"])


@pytest.mark.parametrize("error", [InvalidArgument("no"), Disconnected("gone")])
async def test_text_stream_error_after_the_first_chunk_ends_the_stream(error: Exception) -> None:
    scene = await Scene(workers=2).forward()
    scene.receive_event(chat("hi"))
    scene.answer.on_error(error)
    assert len(scene.model.sent) == 1
    last = scene.client.writes[-1]
    assert last.endswith(b"data: [DONE]\n\n")
    assert b'"error"' in last


async def test_text_client_disconnect_kills_the_call() -> None:
    scene = await Scene().forward()
    scene.client.on_disconnect()
    assert scene.model.outputs == ["kill 1"]
    assert scene.closed == ["cancelled"]
    scene.receive_event(chat("late"))
    scene.answer.on_end()
    scene.answer.on_error(Disconnected("late"))
    assert scene.client.writes == []


async def test_text_client_disconnect_during_the_send_kills_the_call() -> None:
    scene = Scene()
    scene.answer.leave()
    await scene.forward()
    assert scene.model.outputs == ["kill 1"]


# Folding ---------------------------------------------------------------------------------------------------------


def test_text_choices_reasoning_tools_and_logprobs_are_merged() -> None:
    first = {"index": 0, "id": "c1", "function": {"name": "get", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    other = {"index": 1, "id": "c2", "type": "function", "function": {"name": "put", "arguments": "{}"}}
    logged = {"content": [{"token": "x"}]}
    chunks = [
        chat(reasoning_content="hm", index=1),
        chat(tool_calls=[first]),
        chat(tool_calls=[more, other]),
        {"choices": [{"index": 1, "delta": {"content": "x"}, "logprobs": logged}]},
        {"choices": [{"index": 1, "delta": {"content": "y"}, "logprobs": logged, "finish_reason": "length"}]},
        chat(finish="tool_calls"),
    ]
    whole = ChatShape.fold([ChatShape.check(chunk, "m") for chunk in chunks])
    zero, one = whole["choices"]
    assert zero["finish_reason"] == "tool_calls"
    assert zero["message"]["content"] is None
    assert zero["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "put", "arguments": "{}"}},
    ]
    assert (one["message"]["reasoning_content"], one["message"]["content"], one["finish_reason"]) == (
        "hm",
        "xy",
        "length",
    )
    assert one["logprobs"] == {"content": [{"token": "x"}, {"token": "x"}], "refusal": None}
    assert "usage" not in whole


def test_text_completion_logprobs_of_all_chunks_are_joined() -> None:
    def chunk(token: str, place: int) -> dict[str, Any]:
        logged = {"tokens": [token], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [place]}
        return {"choices": [{"index": 0, "text": token, "logprobs": logged}]}

    chunks = [chunk("a", 0), {"choices": [{"index": 0, "text": ""}]}, chunk("b", 1)]
    folded = CompletionShape.fold([CompletionShape.check(one, "m") for one in chunks])
    assert folded["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "top_logprobs": None, "text_offset": [0, 1],
    }  # fmt: skip


def test_text_completions_are_merged() -> None:
    chunks = [
        {"id": "i", "created": 1, "model": "w", "choices": [{"index": 0, "text": "a "}]},
        {"choices": [{"index": 1, "text": "z"}]},
        {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]},
    ]
    assert CompletionShape.fold([CompletionShape.check(chunk, "m") for chunk in chunks]) == {
        "id": "i",
        "choices": [
            {"text": "a b", "index": 0, "finish_reason": "stop", "logprobs": None},
            {"text": "z", "index": 1, "finish_reason": None, "logprobs": None},
        ],
        "created": 1, "model": "w", "system_fingerprint": None, "object": "text_completion", "usage": None,
    }  # fmt: skip
    with pytest.raises(Unknown, match="text"):
        CompletionShape.check(chat("x"), "m")


class Words:
    """Return an endpoint's events as text."""

    plain = False

    def begin(self, prompt_tokens: int) -> bytes:
        return b"begin%d " % prompt_tokens

    def head(self, index: int) -> bytes:
        raise AssertionError

    def tail(self, usage: bytes = b"") -> bytes:
        raise AssertionError

    def text_with_logprobs(self, *given: Any) -> bytes:
        raise AssertionError

    def first(self, index: int) -> bytes:
        return b"first%d " % index

    def events(self, index: int, events: Sequence[Event], *given: Any) -> bytes:
        return "".join(f"{type(event).__name__}{index} " for event in events).encode()

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        return f"{reason}{index} ".encode()

    def usage(self, usage: CompletionUsage) -> bytes:
        return b"usage%d " % usage.total_tokens

    def end(self) -> bytes:
        return b"end"

    def failure(self, error: ErrorAnswer) -> bytes:
        return b"failure"


def words_of(choices: Sequence[FinishedChoice], usage: CompletionUsage) -> bytes:
    return repr([(one.index, one.text(), one.events(), one.finish_reason) for one in choices]).encode()


def writer_of_words() -> TextWriter:
    return TextWriter(Words(), words_of)


def chunk(delta: dict[str, Any], index: int = 0, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}], **more}


CALL = [
    {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
    {"index": 0, "function": {"arguments": "{}"}},
]
CHUNKS = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "So"}),
    chunk({"tool_calls": CALL[:1]}),
    chunk({"tool_calls": CALL[1:]}),
    chunk({}, reason="tool_calls", usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
]


def test_text_chunks_are_converted_to_events_of_the_endpoint() -> None:
    writer = writer_of_words()
    output = b"".join([writer.chunk(one) for one in CHUNKS] + [writer.end()]).decode().split()
    assert output == [
        "begin0", "first0", "ReasoningDelta0", "ContentDelta0", "CallBegin0", "CallArguments0", "tool_calls0", "usage7", "end",
    ]  # fmt: skip


def test_text_choices_begin_and_end_independently() -> None:
    writer = writer_of_words()
    output = writer.chunk(chunk({"content": "a"})) + writer.chunk(chunk({"content": "b"}, 1, "length")) + writer.end()
    assert output.decode().split() == [
        "begin0", "first0", "ContentDelta0", "first1", "ContentDelta1", "stop0", "length1", "usage0", "end",
    ]  # fmt: skip


def test_text_chunks_are_merged_into_one_response() -> None:
    events = [ReasoningDelta("hm"), ContentDelta("So"), CallBegin(0, "f", "c"), CallArguments(0, "{}")]
    assert writer_of_words().whole(CHUNKS) == repr([(0, "So", events, "tool_calls")]).encode()


def test_tool_call_without_an_id_receives_a_generated_id() -> None:
    reported = (
        writer_of_words().whole([chunk({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})]).decode()
    )
    assert "call_id='call-" in reported


def test_failure_uses_the_format_of_the_endpoint() -> None:
    assert writer_of_words().failure(ErrorAnswer(500, "no")) == b"failure"


def test_text_worker_receives_requests_of_its_own_endpoint_unchanged() -> None:
    request = decode_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')
    assert rewritten(CHAT, request, "chatcmpl-1", "m", 5) == (None, None)
