"""Options of `dynamo chat`, and their effect on a request."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli import chat as module
from dynamo.cli.chat import RECORD_S, ChatConfig, await_model, chat
from dynamo.core.errors import CannotConnect, ConfigError, DynamoException
from dynamo.http.client import ChatClient, Delta
from dynamo.ops.graphs import FoundGraph, GraphRecord, GraphState

LOCAL, REMOTE = "http://127.0.0.1:8000", "http://192.0.2.1:8000"


class Clock:
    """Time that passes only while the command sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a busy loop"
        self.now_s += seconds


class Starting(ChatClient):
    """A server that listens and lists its model after some seconds."""

    def __init__(self, clock: Clock, url: str = LOCAL, *, listens_s: float = 0.0, serves_s: float = 0.0) -> None:
        super().__init__(url)
        self._clock, self._listens_s, self._serves_s = clock, listens_s, serves_s

    def models(self) -> list[str]:
        if self._clock.now_s < self._listens_s:
            raise CannotConnect("no server")
        return ["echo"] if self._clock.now_s >= self._serves_s else []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of this command's own, on a machine without graphs."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "find_graphs", list)
    return made


def graph(url: str, *, is_running: bool = True) -> FoundGraph:
    record = GraphRecord(
        name="g", state=GraphState.STARTING, pid=1, ticks=1, url=url, engine="cpu", started=1.0, processes=[]
    )
    return FoundGraph(directory=Path("g"), is_running=is_running, record=record)


def test_chat_waits_for_the_model_of_a_server_that_starts(clock: Clock) -> None:
    assert await_model(Starting(clock, REMOTE, serves_s=12.0), None, 30.0) == "echo"
    assert clock.now_s == pytest.approx(12.0, abs=0.5)


def test_wait_for_a_model_is_bounded_and_zero_does_not_wait(clock: Clock) -> None:
    with pytest.raises(DynamoException, match=r"after 3 s; .*--ready-timeout"):
        await_model(Starting(clock, serves_s=4.0), None, 3.0)
    assert clock.now_s == pytest.approx(3.0)
    clock.now_s = 0.0
    with pytest.raises(DynamoException, match="no model is served yet"):
        await_model(Starting(clock, serves_s=4.0), None, 0.0)
    with pytest.raises(CannotConnect):
        await_model(Starting(clock, listens_s=1.0), None, 0.0)
    assert clock.now_s == 0.0


def test_unknown_model_of_a_serving_server_is_not_awaited(clock: Clock) -> None:
    with pytest.raises(ConfigError, match="not served"):
        await_model(Starting(clock), "other", 30.0)
    assert clock.now_s == 0.0


def test_chat_waits_until_the_graph_of_its_url_listens(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_graphs", lambda: [graph("http://localhost:8000")])
    assert await_model(Starting(clock, listens_s=9.0, serves_s=10.0), None, 30.0) == "echo"
    clock.now_s = 0.0
    with pytest.raises(CannotConnect):
        await_model(Starting(clock, listens_s=9.0), None, 5.0)
    assert clock.now_s == pytest.approx(5.0)


@pytest.mark.parametrize(("url", "expected_s"), [(LOCAL, RECORD_S), (REMOTE, 0.0)])
def test_without_a_graph_only_a_server_of_this_machine_is_awaited_and_briefly(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, url: str, expected_s: float
) -> None:
    graphs = [graph("http://localhost:9000"), graph("http://localhost:8000", is_running=False)]
    monkeypatch.setattr(module, "find_graphs", lambda: graphs)
    with pytest.raises(CannotConnect):
        await_model(Starting(clock, url, listens_s=9.0), None, 30.0)
    assert clock.now_s == pytest.approx(expected_s, abs=0.25)


@pytest.mark.parametrize(
    "config", [{"max_tokens": 0}, {"temperature": 3.0}, {"temperature": -1.0}, {"ready_timeout": -1.0}]
)
def test_invalid_chat_options_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        ChatConfig(**config)


def test_sampling_options_are_sent_only_when_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, Any] | None] = []

    def respond(
        client: ChatClient,
        model: str,
        messages: Sequence[Mapping[str, str]],
        options: Mapping[str, Any] | None = None,
    ) -> Iterator[Delta]:
        sent.append(options)
        yield Delta("ok")

    monkeypatch.setattr(ChatClient, "models", lambda client: ["echo"])
    monkeypatch.setattr(ChatClient, "chat", respond)
    for argv in ([], ["--max-tokens=3", "--temperature=0"]):
        monkeypatch.setattr(sys, "stdin", StringIO("hi\n"))
        assert chat(argv) == 0
    assert sent == [{}, {"max_tokens": 3, "temperature": 0.0}]
