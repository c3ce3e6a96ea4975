"""A cluster over etcd serves through faults of etcd: killed, stopped, data lost, member by member."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.etcd import EtcdCluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.integration

LEASE_TTL_S = 4
CALLERS = 2
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}


class Callers:
    """Clients that send sequential requests and record failures."""

    def __init__(self, cluster: Cluster) -> None:
        self._url = f"http://127.0.0.1:{cluster.port}/v1/chat/completions"
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
        """Return when that many more requests were answered."""
        before = self.answered
        wait_until(lambda: self.answered >= before + count or self.failures, "the callers hang")
        assert self.failures == []


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    monkeypatch.setenv("ETCD_LEASE_TTL", str(LEASE_TTL_S))


def cluster_over(etcd: EtcdCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("ETCD_ENDPOINTS", etcd.endpoints)
    with Cluster(folder, "--migration-limit", "3") as cluster:
        wait_until(lambda: cluster.frontend.poll() is not None or cluster.is_live(), "the frontend never came up")
        assert cluster.frontend.poll() is None, "the frontend ended"
        for _ in range(2):
            cluster.run("mocker", "--model-name", "m", "--speedup-ratio", "2")
        wait_until(lambda: cluster.workers() == 2, "the workers never appeared")
        yield cluster


@pytest.fixture
def single(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as etcd:
        yield etcd.wait()


@pytest.fixture
def cluster(single: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    yield from cluster_over(single, tmp_path, monkeypatch)


def instances(cluster: Cluster) -> list[Any]:
    return sorted(cluster.http.get("/health").json()["instances"], key=json.dumps)


def logs(cluster: Cluster) -> list[Path]:
    """Return the log of each process of the cluster."""
    found = [path for name in ("frontend", "mocker") for path in cluster.folder.glob(f"{name}*.log")]
    assert len(found) == len(cluster.processes)
    return found


def logged(cluster: Cluster, words: str, *, times: int = 1) -> bool:
    """Return whether each process of the cluster has logged it."""
    return all(path.read_text().count(words) >= times for path in logs(cluster))


def test_no_request_fails_during_faults_of_the_only_member(single: EtcdCluster, cluster: Cluster) -> None:
    (member,) = single.members
    before, keys = instances(cluster), single.names()
    assert len([key for key in keys if key.startswith("v1/instances/dynamo/backend/generate/")]) == len(before)

    with Callers(cluster) as callers:
        callers.go_on()

        member.kill()
        assert not member.is_healthy()
        wait_until(lambda: logged(cluster, "etcd unreachable"), "the outage was not noticed")
        callers.go_on()
        assert instances(cluster) == before
        member.start()
        wait_until(lambda: logged(cluster, "lease kept"), "no lease was kept after the restart")
        callers.go_on()
        assert single.names() == keys

        member.pause()
        paused_at = time.monotonic()
        wait_until(lambda: logged(cluster, "etcd unreachable", times=2), "the standstill was not noticed")
        wait_until(lambda: time.monotonic() > paused_at + 1.5 * LEASE_TTL_S, "time stands still")
        callers.go_on()
        member.resume()
        wait_until(lambda: logged(cluster, "etcd reachable again", times=2), "no process reconnected after the pause")
        callers.go_on()
        assert instances(cluster) == before
        wait_until(lambda: single.names() == keys, "not everything was registered again after the standstill")

        member.kill()
        member.wipe()
        member.start()
        single.wait()
        assert member.send_request("/v3/kv/range", key="AA==", range_end="AA==")["header"]["raft_term"] == "2", (
            "it is another"
        )
        wait_until(lambda: logged(cluster, "again"), "no worker registered again")
        wait_until(lambda: single.names() == keys, "not everything was registered again after the loss")
        callers.go_on()
        assert instances(cluster) == before

        wait_until(lambda: time.monotonic() > paused_at + 4 * LEASE_TTL_S, "time stands still")
        callers.go_on()
        assert instances(cluster) == before, "patience ended, and something was missing after all"


def test_graph_started_before_etcd_serves_once_etcd_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = EtcdCluster(tmp_path)
    monkeypatch.setenv("ETCD_ENDPOINTS", etcd.endpoints)
    with Cluster(tmp_path) as cluster:
        cluster.run("mocker", "--model-name", "m", "--speedup-ratio", "2")
        impatient = cluster.run("mocker", "--model-name", "m")
        wait_until(lambda: logged(cluster, "waiting for etcd (ETCD_ENDPOINTS)"), "no message names what is awaited")
        impatient.terminate()
        assert impatient.wait(10) == 0, "who waits can be told to stop"
        with etcd:
            wait_until(lambda: cluster.workers() == 1, "the worker never appeared")
            with Callers(cluster) as callers:
                callers.go_on()
            cluster.stop()


def test_worker_killed_during_an_outage_is_removed_after_it(single: EtcdCluster, cluster: Cluster) -> None:
    (member,) = single.members
    with Callers(cluster) as callers:
        callers.go_on()
        member.kill()
        wait_until(lambda: logged(cluster, "etcd unreachable"), "the outage was not noticed")
        cluster.processes[-1].kill()
        assert cluster.processes[-1].wait() < 0
        assert cluster.workers() == 2, "the last view stands"
        member.start()
        wait_until(lambda: cluster.workers() == 1, "the dead worker is still listed")
        callers.go_on()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path, 3) as etcd:
        yield etcd.wait()


def test_each_of_three_members_may_be_killed_or_paused_in_turn(
    three: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in cluster_over(three, tmp_path, monkeypatch):
        before, names = instances(cluster), three.names()
        with Callers(cluster) as callers:
            callers.go_on()
            for member in three.members:
                member.kill()
                assert not member.is_healthy()
                callers.go_on()
                assert instances(cluster) == before
                member.start()
                three.wait()
                wait_until(lambda names=names: three.names() == names, "not all is registered as before")
            wait_until(
                lambda cluster=cluster: logged(cluster, "etcd unreachable"), "each spoke to a member when it was killed"
            )

            moved = [path.read_text().count("etcd reachable again") for path in logs(cluster)]
            for member in three.members:
                member.pause()
                paused_at = time.monotonic()
                wait_until(lambda since=paused_at: time.monotonic() > since + LEASE_TTL_S / 2, "time stands still")
                callers.go_on()
                assert instances(cluster) == before
                member.resume()
                three.wait()
                wait_until(lambda names=names: three.names() == names, "not all is registered as before")

            def moved_on(cluster: Cluster = cluster, moved: list[int] = moved) -> bool:
                counts = [path.read_text().count("etcd reachable again") for path in logs(cluster)]
                return all(after > before for before, after in zip(moved, counts, strict=True))

            wait_until(moved_on, "and to one when it stood still")
