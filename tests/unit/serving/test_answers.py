"""Responses of generations, over a recording exchange."""

import asyncio
import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from tests.settle import turns, until

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import Disconnected, InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo.runtime.request_plane.base import Item
from dynamo.serving.answers import FREED_HERE_TOKENS, JOINED_BYTES, BaseAnswer, Flusher, StreamAnswer, UnaryAnswer
from dynamo.serving.choice import Frame
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.postprocessor import ChatChunks, Written, chat_body
from dynamo.serving.request_state import RequestState
from dynamo.text.detokenizer import TokenTable, text_json_of

RAW = [b"<e>", b"Hi", b" you", b"!"]
TABLE = TokenTable(RAW, text_json_of(RAW), skipped=frozenset({0}))


class Client:
    """An exchange's outside."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.status: int | None = None
        self.response_started = False
        self.is_ended = False
        self.disconnected = False
        self.on_disconnect: Any = None

    def write(self, data: bytes) -> None:
        self.response_started = True
        self.writes.append(data)

    def write_framed(self, frame: Frame, text: bytes) -> None:
        assert frame.size == len(frame.head) + len(frame.tail)
        self.write(frame.head + text + frame.tail)

    def write_parts(self, parts: Sequence[bytes]) -> None:
        self.parts = list(parts)
        self.write(b"".join(parts))

    def end(self, data: bytes = b"") -> None:
        self.write(data)
        self.is_ended = True

    def respond(self, status: int, body: bytes) -> None:
        self.status = status
        self.end(body)

    def refuse(self, error: Any) -> None:
        self.respond(error.status, error.body())

    def events(self) -> list[Any]:
        lines = b"".join(self.writes).split(b"\n\n")
        assert lines.pop() == b""
        assert lines.pop() == b"data: [DONE]"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]


class Scene:
    """Response with its generation and its client."""

    def __init__(self, *, stream: bool = True, usage: bool = False, running: bool = False, retry: bool = False) -> None:
        self.registry = MetricsRegistry()
        record = RequestState(FrontendMetrics(self.registry), "chat_completions", "m", stream=stream, started_s=0)
        self.client: Any = Client()
        self.closed: list[str] = []
        self.calls: list[str] = []
        flusher = Flusher(asyncio.get_running_loop())

        def closed(answer: BaseAnswer, label: str, error: Exception | None) -> None:
            self.closed.append(label)
            record.close(label, None, 1.0)

        def retried(generation: Generation, error: Exception) -> bool:
            if retry:
                generation.revive()
            return retry

        self.answer: BaseAnswer
        if stream:
            self.answer = StreamAnswer(
                self.client, record, closed, retried,
                chunks=ChatChunks("id", "m", 1), flusher=flusher, usage=usage, running_usage=running,
            )  # fmt: skip
        else:
            self.answer = UnaryAnswer(self.client, record, closed, retried, partial(chat_body, "id", "m", 1))

    def kill(self) -> None:
        self.calls.append("kill")

    instance_id = 1

    def generation(self, **stop: Any) -> Generation:
        n = stop.pop("n", None)
        request = PreprocessedRequest(
            "m", [1], stop_conditions=StopConditions(stop_token_ids_hidden=[0], **stop),
            sampling_options=SamplingOptions(n=n),
        )  # fmt: skip
        generation = Generation(request, TABLE, self.answer, len(self.answer.choices()))
        generation.call = self  # type: ignore[assignment]
        self.answer.add(generation)
        return generation


def last(index: int = 0, reason: str = "length") -> Item:
    return Item(msgpack_encode(EngineOutput([3], index, finish_reason=reason)))


async def test_tokens_of_one_tick_are_written_together_as_separate_events() -> None:
    scene = Scene(usage=True)
    generation = scene.generation()
    generation.on_token(1)
    generation.on_token(2)
    assert scene.client.writes == []
    await turns()
    assert len(scene.client.writes) == 1
    generation.on_token(2)
    await turns()
    generation.on_item(last())
    generation.on_end()
    await turns()
    assert scene.client.is_ended
    assert len(scene.client.writes) == 3
    events = scene.client.events()
    contents = [one["choices"][0]["delta"].get("content") for one in events if one["choices"]]
    assert contents == ["", "Hi", " you", " you", "!", None]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert scene.closed == [""]


async def test_response_that_ends_in_its_first_tick_is_complete() -> None:
    scene = Scene()
    generation = scene.generation()
    generation.on_token(1)
    generation.on_item(last(reason="stop"))
    generation.on_end()
    await turns()
    contents = [one["choices"][0]["delta"].get("content") for one in scene.client.events()]
    assert contents == ["", "Hi", "!", None]


async def test_running_usage_is_in_every_chunk() -> None:
    scene = Scene(running=True, usage=True)
    generation = scene.generation()
    for _ in range(2):
        generation.on_token(1)
        await turns()
    generation.on_item(last())
    generation.on_end()
    counts = [one["usage"]["completion_tokens"] for one in scene.client.events() if one.get("usage")]
    assert counts == [1, 1, 2, 3, 3, 3]  # The role, three texts, the reason, the last count.


async def test_choices_of_several_generations_end_independently() -> None:
    scene = Scene()
    first, second = scene.generation(), scene.generation(n=2)
    second.on_item(last(index=1))
    await turns()
    first.on_token(1)
    first.on_item(last())
    first.on_end()
    second.on_item(last(index=0))
    second.on_end()
    events = scene.client.events()
    ends = [one["choices"][0]["index"] for one in events if one["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    opened = [one["choices"][0]["index"] for one in events if one["choices"][0]["delta"].get("role")]
    assert sorted(opened) == [0, 1, 2]


async def test_error_before_the_first_token_keeps_its_status() -> None:
    scene = Scene()
    scene.generation().on_error(InvalidArgument("too long", param="messages"))
    assert scene.client.status == 400
    assert scene.closed == ["validation"]


async def test_error_after_the_first_token_is_an_event_and_ends_the_stream() -> None:
    scene = Scene()
    generation = scene.generation()
    generation.on_token(1)
    await turns()
    generation.on_error(Disconnected("gone"))
    assert scene.client.is_ended
    assert scene.client.events()[-1]["error"]["code"] == "unavailable"
    assert scene.closed == ["unavailable"]


async def test_retried_generation_continues_without_a_visible_error() -> None:
    scene = Scene(retry=True)
    generation = scene.generation()
    generation.on_error(Disconnected("gone"))
    generation.on_item(last())
    generation.on_end()
    assert scene.closed == [""]
    assert scene.client.events()[-1]["choices"][0]["finish_reason"] == "length"


async def test_client_disconnect_kills_the_call_of_every_worker() -> None:
    scene = Scene()
    scene.generation()
    scene.generation()
    scene.client.on_disconnect()
    assert scene.calls == ["kill", "kill"]
    assert scene.closed == ["cancelled"]
    assert scene.client.writes == []


async def test_failed_prompt_of_a_batch_ends_the_whole_response_once() -> None:
    scene = Scene(stream=False)
    first, second = scene.generation(), scene.generation()
    first.on_error(Disconnected("gone"))
    second.on_error(Disconnected("gone"))
    assert scene.client.status == 503
    assert scene.closed == ["unavailable"]
    assert scene.calls == ["kill", "kill"]


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_unary_response_is_one_body(reason: str) -> None:
    scene = Scene(stream=False)
    generation = scene.generation()
    generation.on_token(1)
    generation.on_item(last(reason=reason))
    generation.on_end()
    body = json.loads(scene.client.writes[0])
    assert body["choices"][0]["message"] == {"content": "Hi!", "refusal": None, "role": "assistant"}
    assert body["choices"][0]["finish_reason"] == reason
    assert body["usage"]["completion_tokens"] == 2


async def test_unary_response_that_cannot_be_written_is_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(stream=False)

    def body(*_: Any) -> bytes:
        raise AttributeError("no such thing")

    scene.answer._body = body  # type: ignore[attr-defined]
    generation = scene.generation()
    generation.on_item(last())
    generation.on_end()
    assert scene.closed == ["internal"]
    assert "request failed" in caplog.text


async def test_request_gauges_return_to_zero_after_the_response() -> None:
    scene = Scene()
    generation = scene.generation()
    generation.on_token(1)
    await turns()
    generation.on_item(last())
    generation.on_end()
    text = scene.registry.render()
    for line in ("inflight_requests", "queued_requests", "active_requests"):
        assert f'dynamo_frontend_{line}{{model="m"}} 0' in text
    assert (
        'requests_total{endpoint="chat_completions",error_type="",model="m",request_type="stream",status="success"} 1'
        in text
    )


async def test_unary_response_records_worker_activity_after_the_first_token() -> None:
    scene = Scene(stream=False)
    generation = scene.generation()
    generation.on_token(1)
    scene.answer.state.last_s = 1.0  # The first token of a whole response is the only one that is timed.
    assert scene.answer.spoke_s(2.0) == 2.0
    assert scene.answer.spoke_s(3.0) == 2.0
    generation.on_token(1)
    assert scene.answer.spoke_s(4.0) == 4.0
    assert scene.answer.spoke_s(9.0) == 4.0


async def test_response_that_starts_over_has_sent_nothing_new() -> None:
    scene = Scene(stream=False)
    generation = scene.generation()
    generation.on_token(1)
    scene.answer.state.last_s = 1.0
    assert scene.answer.spoke_s(2.0) == 2.0
    generation.start_over()
    assert scene.answer.spoke_s(3.0) == 2.0
    generation.on_token(1)
    assert scene.answer.spoke_s(4.0) == 4.0


@pytest.mark.parametrize("tokens", [FREED_HERE_TOKENS // 2, FREED_HERE_TOKENS])
async def test_long_prompts_are_freed_in_a_thread(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("dynamo.serving.answers.start_in_few_threads", lambda *values: started.append(values))
    scene = Scene()
    prompts = [[1] * tokens, [2]]
    for prompt in prompts:
        scene.generation().request.token_ids = prompt
    scene.answer.drop_generations()
    assert [(name, threads) for _, name, threads in started] == ([("free", 1)] if tokens == FREED_HERE_TOKENS else [])
    prompts.clear()
    del prompt
    for work, _, _ in started:
        assert work() == 2, "nothing else refers to them"


def whole_scene(body: Any) -> tuple[Scene, Generation]:
    """Return a response that is not streamed, with this body."""
    scene = Scene(stream=False)
    scene.answer._body = body  # type: ignore[attr-defined]
    return scene, scene.generation()


async def test_long_body_is_computed_in_a_thread_and_the_response_ends_after_it() -> None:
    threads: list[int] = []
    may_end = threading.Event()

    def later() -> bytes:
        threads.append(threading.get_ident())
        assert may_end.wait(30)
        return b"long"

    scene, generation = whole_scene(lambda choices, usage: later)
    generation.on_item(last())
    generation.on_end()
    await turns(3)
    assert scene.client.status is None and scene.closed == []
    may_end.set()
    await until(lambda: scene.closed)
    assert (scene.client.status, scene.client.writes, scene.closed) == (200, [b"long"], [""])
    assert threads and threads[0] != threading.get_ident()


async def test_long_body_that_cannot_be_computed_is_an_internal_error() -> None:
    def later() -> bytes:
        raise ValueError("no")

    scene, generation = whole_scene(lambda choices, usage: later)
    generation.on_item(last())
    generation.on_end()
    await until(lambda: scene.closed)
    assert scene.client.status == 500


async def test_client_that_leaves_before_its_long_body_gets_none() -> None:
    may_end = threading.Event()
    scene, generation = whole_scene(lambda choices, usage: lambda: str(may_end.wait(30)).encode())
    generation.on_item(last())
    generation.on_end()
    scene.answer.leave()
    may_end.set()
    await turns(50)
    assert (scene.client.status, scene.closed) == (None, ["cancelled"])


class LongChunks(ChatChunks):
    """Chunks whose first and last events have long parts."""

    LONG = b"x" * (JOINED_BYTES + 1)

    def begin(self, prompt_tokens: int) -> Written:
        return [b"data: begin ", self.LONG]

    def usage(self, usage: Any) -> Written:
        return [self.LONG, b" usage"]


async def test_long_parts_of_events_are_not_joined_with_others() -> None:
    scene = Scene(usage=True)
    scene.answer._chunks = LongChunks("id", "m", 1)  # type: ignore[attr-defined]
    generation = scene.generation()
    generation.on_token(1)
    await turns()
    assert any(part is LongChunks.LONG for part in scene.client.parts)
    first = b"".join(scene.client.writes)
    assert first.startswith(b"data: begin xx") and b"Hi" in first
    generation.on_item(last())
    generation.on_end()
    assert any(part is LongChunks.LONG for part in scene.client.parts)
    assert scene.client.is_ended and scene.closed == [""]
    assert b"".join(scene.client.writes).endswith(b" usagedata: [DONE]\n\n")
