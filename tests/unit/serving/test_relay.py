"""Relay: a request finds another worker as long as nothing was answered, and no answer fills the memory."""

from typing import Any

import pytest

from dynamo.core.codec import json_encode, msgpack_decode, msgpack_encode
from dynamo.core.errors import Disconnected, Unknown, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.runtime.request_plane.base import Item
from dynamo.serving import relay
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.relay import Form, RelayAnswer, Whole
from dynamo.serving.request_state import RequestState


class Client:
    """An exchange's outside."""

    def __init__(self) -> None:
        self.response_started = False
        self.disconnected = False
        self.header_bytes = b""
        self.on_disconnect: Any = None
        self.transport = self
        self.said: list[Any] = []

    def open(self, content_type: bytes) -> None:
        self.response_started = True
        self.said.append(content_type)

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def end(self, data: bytes = b"") -> None:
        self.said.append(("end", data))

    def abort(self) -> None:
        self.said.append("abort")

    def respond(self, status: int, body: bytes, content_type: bytes = b"") -> None:
        self.said.append((status, body, content_type))

    def refuse(self, error: ErrorAnswer) -> None:
        self.said.append(error.status)


class FakeCall:
    def __init__(self, instance_id: int, killed: list[int]) -> None:
        self.instance_id = instance_id
        self._killed = killed

    def stop(self) -> None: ...

    def kill(self) -> None:
        self._killed.append(self.instance_id)


class FakeModel:
    name = "m"

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.asked: list[tuple[int, Any]] = []
        self.killed: list[int] = []

    async def send(self, body: bytes, receiver: Any, *, exclude: frozenset[int], **how: Any) -> FakeCall:
        left = [worker for worker in range(1, self.workers + 1) if worker not in exclude]
        if not left:
            raise WorkerUnavailable("nobody is left")
        self.asked.append((left[0], msgpack_decode(body)))
        return FakeCall(left[0], self.killed)


class Pieces(Form):
    """Writes each item at once; an item `None` is its failure."""

    media = b"x/y"

    def add(self, value: Any) -> bytes:
        if value is None:
            self.refusal = Whole(b"no", status=400)
            return b""
        return json_encode(value)

    def end(self) -> Whole | bytes:
        return b"."

    def failure(self, error: ErrorAnswer) -> bytes | None:
        return None if error.status == 500 else super().failure(error)


class Together(Form):
    """Writes everything at the end."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def add(self, value: Any) -> bytes:
        self.items.append(value)
        return b""

    def end(self) -> Whole:
        return Whole(json_encode(self.items), headers=b"x: y\r\n")


class Scene:
    def __init__(self, form: Form, *, stream: bool = False, workers: int = 1) -> None:
        self.client: Any = Client()
        self.model: Any = FakeModel(workers)
        self.tasks = TaskOwner("test")
        self.closed: list[str] = []
        self.took: list[float] = []
        record = RequestState(FrontendMetrics(MetricsRegistry()), "e", "m", stream=stream, started_s=0)
        self.answer = RelayAnswer(
            self.client, record, lambda answer, label, error: self.closed.append(label),
            model=self.model, tasks=self.tasks, request=msgpack_encode("ask"), form=form, on_success=self.took.append,
        )  # fmt: skip

    async def begun(self) -> "Scene":
        await self.answer.forward()
        return self

    def hear(self, *values: Any) -> None:
        for value in values:
            self.answer.on_item(Item(msgpack_encode(value)))


async def test_an_answer_is_told_at_its_end_with_its_headers() -> None:
    scene = await Scene(Together()).begun()
    scene.hear(1, 2)
    scene.answer.on_item(Item(None, event="note"))
    assert scene.client.said == []
    scene.answer.on_end()
    assert scene.client.said == [(200, b"[1,2]", b"application/json")]
    assert (scene.client.header_bytes, scene.closed, len(scene.took)) == (b"x: y\r\n", [""], 1)
    assert scene.model.asked == [(1, "ask")]


async def test_pieces_are_told_at_once_under_their_own_type() -> None:
    scene = await Scene(Pieces(), stream=True).begun()
    scene.hear(1, 2)
    assert scene.client.said == [b"x/y", b"1", b"2"]
    scene.answer.on_end()
    scene.answer.on_end()
    scene.hear(3)
    assert scene.client.said[3:] == [("end", b".")]
    assert scene.closed == [""]


async def test_another_worker_is_asked_until_one_has_spoken() -> None:
    scene = await Scene(Pieces(), stream=True, workers=3).begun()
    scene.answer.on_error(Disconnected("gone"))
    assert await scene.tasks.wait(30)
    scene.hear(1)
    scene.answer.on_error(Disconnected("gone too"))
    assert [worker for worker, _ in scene.model.asked] == [1, 2]
    assert scene.closed == ["unavailable"]
    assert scene.client.said[-1][0] == "end"


async def test_a_form_without_a_word_for_errors_breaks_off() -> None:
    scene = await Scene(Pieces(), stream=True).begun()
    scene.hear(1)
    scene.answer.on_error(Unknown("secret"))
    assert scene.client.said[-1] == "abort"
    late = await Scene(Pieces(), stream=True).begun()
    late.answer.on_error(Unknown("secret"))
    assert late.client.said == [500]


async def test_a_failure_in_the_workers_own_form_is_the_answer() -> None:
    scene = await Scene(Pieces()).begun()
    scene.hear(None)
    assert scene.client.said == [(400, b"no", b"application/json")]
    assert (scene.model.killed, scene.closed) == ([1], ["validation"])


async def test_a_bare_token_is_no_item() -> None:
    scene = await Scene(Together()).begun()
    scene.answer.on_token(5)
    assert scene.client.said == [500]
    assert scene.model.killed == [1]


async def test_no_answer_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "KEPT_BYTES_MAX", 100)
    scene = await Scene(Together()).begun()
    scene.hear("x" * 60)
    scene.hear("x" * 60)
    assert (scene.client.said, scene.model.killed) == ([500], [1])
    stream = await Scene(Pieces(), stream=True).begun()
    stream.hear("x" * 60, "x" * 60)
    assert len(stream.client.said) == 3


async def test_a_client_that_leaves_stops_the_worker() -> None:
    scene = await Scene(Together()).begun()
    scene.answer.leave()
    scene.hear(1)
    scene.answer.on_end()
    assert (scene.client.said, scene.model.killed, scene.closed) == ([], [1], ["cancelled"])
