"""A graph over etcd goes on serving whatever happens to etcd: killed, stopped, robbed of its memory, member by member."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from tests.etcd_cluster import EtcdCluster, wait_until
from tests.integration.graph import Graph, is_live, wait_for

pytestmark = pytest.mark.integration

LEASE_TTL_S = 4
CALLERS = 2
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}


class Callers:
    """Clients that ask one thing after another, and remember what went wrong."""

    def __init__(self, graph: Graph) -> None:
        self._url = f"http://127.0.0.1:{graph.port}/v1/chat/completions"
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._ending.is_set():
                answer = client.post(self._url, json=CHAT)
                whole = answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
                if whole and '"finish_reason":"length"' in answer.text:
                    self.answered += 1
                else:
                    self.failures.append(f"{answer.status_code} {answer.text[-300:]}")

    def go_on(self, count: int = 6) -> None:
        """Returns when so many more were answered."""
        before = self.answered
        wait_until(lambda: self.answered >= before + count or self.failures, "the callers hang")
        assert self.failures == []


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    monkeypatch.setenv("ETCD_LEASE_TTL", str(LEASE_TTL_S))


def graph_over(cluster: EtcdCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    monkeypatch.setenv("ETCD_ENDPOINTS", cluster.endpoints)
    graph = Graph(folder, "--migration-limit", "3")
    try:
        wait_for(lambda: graph.frontend.poll() is not None or is_live(graph), "the frontend never came up")
        assert graph.frontend.poll() is None, "the frontend ended"
        for _ in range(2):
            graph.run("mocker", "--model-name", "m", "--speedup-ratio", "2")
        wait_for(lambda: graph.workers() == 2, "the workers never appeared")
        yield graph
    finally:
        graph.stop()


@pytest.fixture
def single(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as cluster:
        yield cluster.wait()


@pytest.fixture
def graph(single: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    yield from graph_over(single, tmp_path, monkeypatch)


def instances(graph: Graph) -> list[Any]:
    return sorted(graph.http.get("/health").json()["instances"], key=json.dumps)


def logs(graph: Graph) -> list[Path]:
    """What each process of the graph wrote."""
    found = [path for name in ("frontend", "mocker") for path in graph.folder.glob(f"{name}*.log")]
    assert len(found) == len(graph.processes)
    return found


def logged(graph: Graph, words: str, *, times: int = 1) -> bool:
    """True when each process of the graph has said so."""
    return all(path.read_text().count(words) >= times for path in logs(graph))


def test_no_request_fails_whatever_happens_to_the_only_member(single: EtcdCluster, graph: Graph) -> None:
    (member,) = single.members
    before, keys = instances(graph), single.names()
    assert len([key for key in keys if key.startswith("v1/instances/dynamo/backend/generate/")]) == len(before)

    with Callers(graph) as callers:
        callers.go_on()

        member.kill()
        assert not member.is_healthy()
        wait_for(lambda: logged(graph, "etcd unreachable"), "the outage was not noticed")
        callers.go_on()
        assert instances(graph) == before
        member.start()
        wait_for(lambda: logged(graph, "lease kept"), "nobody came back after the restart")
        callers.go_on()
        assert single.names() == keys

        member.pause()
        paused_at = time.monotonic()
        wait_for(lambda: logged(graph, "etcd unreachable", times=2), "the standstill was not noticed")
        wait_until(lambda: time.monotonic() > paused_at + 1.5 * LEASE_TTL_S, "time stands still")
        callers.go_on()
        member.resume()
        wait_for(lambda: logged(graph, "etcd reachable again", times=2), "nobody came back after the standstill")
        callers.go_on()
        assert instances(graph) == before
        wait_for(lambda: single.names() == keys, "not everything was registered again after the standstill")

        member.kill()
        member.wipe()
        member.start()
        single.wait()
        assert member.ask("/v3/kv/range", key="AA==", range_end="AA==")["header"]["raft_term"] == "2", "it is another"
        wait_for(lambda: logged(graph, "again"), "nobody registered again")
        wait_for(lambda: single.names() == keys, "not everything was registered again after the loss")
        callers.go_on()
        assert instances(graph) == before

        wait_until(lambda: time.monotonic() > paused_at + 4 * LEASE_TTL_S, "time stands still")
        callers.go_on()
        assert instances(graph) == before, "patience ended, and something was missing after all"


def test_a_graph_that_started_before_etcd_serves_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EtcdCluster(tmp_path)
    monkeypatch.setenv("ETCD_ENDPOINTS", cluster.endpoints)
    graph = Graph(tmp_path)
    try:
        graph.run("mocker", "--model-name", "m", "--speedup-ratio", "2")
        impatient = graph.run("mocker", "--model-name", "m")
        wait_for(lambda: logged(graph, "waiting for etcd (ETCD_ENDPOINTS)"), "nobody said what is awaited")
        impatient.terminate()
        assert impatient.wait(10) == 0, "who waits can be told to stop"
        with cluster:
            wait_for(lambda: graph.workers() == 1, "the worker never appeared")
            with Callers(graph) as callers:
                callers.go_on()
            graph.stop()
    finally:
        graph.stop()


def test_a_worker_that_dies_during_an_outage_is_forgotten_after_it(single: EtcdCluster, graph: Graph) -> None:
    (member,) = single.members
    with Callers(graph) as callers:
        callers.go_on()
        member.kill()
        wait_for(lambda: logged(graph, "etcd unreachable"), "the outage was not noticed")
        graph.processes[-1].kill()
        assert graph.processes[-1].wait() < 0
        assert graph.workers() == 2, "the last view stands"
        member.start()
        wait_for(lambda: graph.workers() == 1, "the dead worker is still listed")
        callers.go_on()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path, 3) as cluster:
        yield cluster.wait()


def test_each_member_of_three_may_die_and_stand_still_in_turn(
    three: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for graph in graph_over(three, tmp_path, monkeypatch):
        before, names = instances(graph), three.names()
        with Callers(graph) as callers:
            callers.go_on()
            for member in three.members:
                member.kill()
                assert not member.is_healthy()
                callers.go_on()
                assert instances(graph) == before
                member.start()
                three.wait()
                wait_for(lambda names=names: three.names() == names, "not all is registered as before")
            wait_for(lambda graph=graph: logged(graph, "etcd unreachable"), "each spoke to a member when it was killed")

            moved = [path.read_text().count("etcd reachable again") for path in logs(graph)]
            for member in three.members:
                member.pause()
                paused_at = time.monotonic()
                wait_until(lambda since=paused_at: time.monotonic() > since + LEASE_TTL_S / 2, "time stands still")
                callers.go_on()
                assert instances(graph) == before
                member.resume()
                three.wait()
                wait_for(lambda names=names: three.names() == names, "not all is registered as before")

            def moved_on(graph: Graph = graph, moved: list[int] = moved) -> bool:
                counts = [path.read_text().count("etcd reachable again") for path in logs(graph)]
                return all(after > before for before, after in zip(moved, counts, strict=True))

            wait_for(moved_on, "and to one when it stood still")
