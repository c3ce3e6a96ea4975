"""KV routing with real processes: a prefix stays with its worker, and the failure of that worker fails no request."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.nats import NatsServer
from tests.cluster.processes import wait_until

from dynamo.kv_router.eligibility import AVOIDED

pytestmark = pytest.mark.integration

KV = ("--router-mode", "kv")
BLOCK = 16
QUICK = ("--block-size", str(BLOCK), "--speedup-ratio", "0")
POLICY = """
worker_selection:
  aggregated: ours
  instances:
    - {name: ours, type: balanced, parameters: {router_temperature: 0}}
"""


class RoutedCluster(Cluster):
    """Cluster whose frontend routes by the workers' cached blocks."""

    def chat(
        self, number: int, *, headers: dict[str, str] | None = None, worker: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return the routing data of a long prompt with that number, with the ids of the response.

        The request names its worker where one is given.
        """
        words = " ".join(f"{number} item {number * 1000 + word}" for word in range(30))
        named = {} if worker is None else {"backend_instance_id": worker}
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 4,
            "nvext": {"extra_fields": ["routing", "timing"], **named},
            **fields,
        }
        answer = self.http.post("/v1/chat/completions", json=body, headers={"x-dynamo-explain": "1", **(headers or {})})
        assert answer.status_code == 200, answer.text
        reported = answer.json()["nvext"]
        return {
            **reported["routing"],
            **reported["timing"],
            "id": answer.json()["id"],
            "header": answer.headers["x-dynamo-routing"],
        }

    def is_cached(self, number: int) -> bool:
        """Return whether the router sends a prompt to a worker that caches all of it."""
        return bool(self.chat(number)["kv_hit_rate"] > 0.9)

    def held(self) -> dict[int, int]:
        """Return the number of blocks that each worker has published."""
        (router,) = self.http.get("/routing/state").json()["routers"]
        return {rank["worker_id"]: rank["held_blocks"] for rank in router["ranks"]}

    def ranks(self) -> int:
        """Return the number of ranks that the routers choose from, which the frontend lists once it has their card."""
        try:
            return sum(len(router["ranks"]) for router in self.http.get("/routing/state").json()["routers"])
        except httpx.TransportError:  # It does not listen yet.
            return 0

    def has_all(self, held: dict[int, int]) -> bool:
        """Return whether the router has at least as many blocks of each worker."""
        routers = self.http.get("/routing/state").json()["routers"]
        known = {rank["worker_id"]: rank["held_blocks"] for router in routers for rank in router["ranks"]}
        return all(known.get(worker, 0) >= blocks for worker, blocks in held.items())

    def holders(self, numbers: range) -> dict[int, int]:
        """Send the prompts to the workers in turn, each once its predecessor is indexed; return the holder of each.

        The router would choose at random between workers without load that do not cache a prompt.
        """
        found, workers = {}, sorted(self.held())
        for number in numbers:
            before = self.held()
            reported = self.chat(number, worker=workers[number % len(workers)])
            worker, new = reported["worker_id"], reported["prompt_blocks"] - reported["device_blocks"]
            wait_until(
                partial(self.has_published, worker, before[worker] + new), "the router never heard of its blocks"
            )
            found[number] = worker
        return found

    def has_avoided(self, reported: dict[str, Any]) -> bool:
        """Return whether the router avoided a worker for a request: one that the machine suspended for a second."""
        decisions = self.http.get("/routing/decisions", params={"request_id": reported["id"]})
        assert decisions.status_code == 200, decisions.text
        return AVOIDED in decisions.text

    def strays(self, holders: dict[int, int]) -> dict[int, int]:
        """Send each prompt once; return the worker of each that does not go to its holder, although that is responsive."""
        reported = {number: self.chat(number) for number in holders}
        return {
            number: one["worker_id"]
            for number, one in reported.items()
            if one["worker_id"] != holders[number] and not self.has_avoided(one)
        }

    def has_published(self, worker: int, blocks: int) -> bool:
        """Return whether a worker has published that many blocks."""
        return self.held()[worker] >= blocks

    def route(self, *argv: str) -> str:
        """Run `dynamo route`."""
        command = [sys.executable, "-m", "dynamo.cli", "route", *argv, "--url", f"http://127.0.0.1:{self.port}"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        self.http.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def open_clusters(tmp_path: Path) -> Iterator[list[RoutedCluster]]:
    clusters: list[RoutedCluster] = []
    yield clusters
    for cluster in clusters:
        cluster.close()


def make_cluster(
    clusters: list[RoutedCluster], folder: Path, *frontend: str, workers: int = 2, flags: tuple[str, ...] = QUICK
) -> RoutedCluster:
    cluster = RoutedCluster(folder, *KV, *frontend)
    clusters.append(cluster)
    for _ in range(workers):
        cluster.mocker(*flags)
    if workers:
        wait_until(lambda: cluster.ranks() == workers, "the router does not know all workers")
    return cluster


def test_prefixes_are_routed_to_caching_workers_and_a_killed_one_fails_no_request(
    open_clusters: list[RoutedCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(open_clusters, tmp_path)
    holders = cluster.holders(range(8))
    assert len(set(holders.values())) == 2, "both have some"
    for number, worker in holders.items():
        reported = cluster.chat(number)
        if cluster.has_avoided(reported):
            continue
        assert (reported["worker_id"], reported["device_blocks"] > 4) == (worker, True)
        assert reported["header"].startswith(
            f"worker={worker}; rank=0; device={reported['device_blocks']}; host=0; disk=0; "
        )
    last = cluster.chat(3)
    explained = cluster.route("explain", last["id"])
    assert all(f"{worker:x}" in explained or str(worker) in explained for worker in set(holders.values()))
    state = cluster.route("state")
    assert "m" in state

    victim = cluster.processes[1]
    with ThreadPoolExecutor(8) as clients:
        requested = [clients.submit(cluster.chat, number % 8, max_tokens=2) for number in range(40)]
        victim.kill()
        victim.wait()
        for answer in requested:
            assert answer.result()["worker_id"] in holders.values()
    wait_until(lambda: cluster.workers() == 1, "the dead worker stayed")
    survivors = {cluster.chat(number)["worker_id"] for number in range(8)}
    assert len(survivors) == 1
    wait_until(lambda: all(cluster.is_cached(number) for number in range(8)), "the prefixes never settled")


def test_turns_of_a_session_are_routed_to_one_worker(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    cluster = make_cluster(open_clusters, tmp_path, "--router-session-affinity-ttl-secs", "60")
    for session in range(4):
        header = {"x-dynamo-session-id": f"s{session}"}
        turns = [cluster.chat(100 * session + turn, headers=header) for turn in range(5)]
        workers = {reported["worker_id"] for reported in turns}
        # The prompts have nothing in common but their session.
        assert len(workers) == 1 or any(map(cluster.has_avoided, turns))


def test_policy_file_determines_the_routing(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    cluster = make_cluster(open_clusters, tmp_path, "--router-policy-config", str(policy))
    holders = cluster.holders(range(4))
    assert cluster.strays(holders) == {}
    assert cluster.http.get("/routing/state").json()["routers"][0]["policy"] == "balanced"


def test_requests_wait_while_all_workers_are_busy(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    slow = (
        "--block-size",
        str(BLOCK),
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "64",
        "--speedup-ratio",
        "0.2",
    )
    cluster = make_cluster(open_clusters, tmp_path, "--router-queue-threshold", "0.5", workers=1, flags=slow)
    with ThreadPoolExecutor(16) as clients:
        requested = [clients.submit(cluster.chat, 1000 + number) for number in range(16)]

        def some_wait() -> bool:
            return bool(cluster.http.get("/routing/state").json()["routers"][0]["waiting_requests"] > 0)

        wait_until(some_wait, "no request was queued")
        assert {one.result()["worker_id"] for one in requested}


def test_without_kv_events_sent_prompts_are_assumed_cached(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    cluster = make_cluster(open_clusters, tmp_path, "--no-router-kv-events")
    first = {number: cluster.chat(number)["worker_id"] for number in range(6)}
    assert cluster.strays(first) == {}
    assert cluster.chat(0)["kv_hit_rate"] > 0.9
    assert cluster.http.get("/routing/state").json()["routers"][0]["is_guessing"]


def test_frontends_share_active_requests(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    slow = ("--block-size", str(BLOCK), "--speedup-ratio", "0.03")
    first = make_cluster(open_clusters, tmp_path, "--router-replica-sync", workers=0)
    second = make_cluster(open_clusters, tmp_path, "--router-replica-sync", workers=0)
    for _ in range(2):
        first.mocker(*slow)
    wait_until(lambda: first.ranks() == second.ranks() == 2, "the routers do not know both workers")

    def is_received(sender: RoutedCluster, receiver: RoutedCluster) -> bool:
        """Send a request; return whether the other router has received any event: it may have subscribed a moment ago."""
        sender.chat(0, max_tokens=1)
        return receiver.metric("dynamo_router_replica_sync_events_received_total") > 0

    for sender, receiver in ((first, second), (second, first)):
        wait_until(partial(is_received, sender, receiver), "the routers do not exchange their requests")

    def active(cluster: RoutedCluster) -> int:
        routers = cluster.http.get("/routing/state").json()["routers"]
        return sum(rank["active_requests"] for rank in routers[0]["ranks"])

    with ThreadPoolExecutor(4) as clients:
        requested = [clients.submit(first.chat, 50 + number, max_tokens=40) for number in range(4)]
        wait_until(lambda: active(second) == 4, "the other router never heard of them")
        for one in requested:
            one.result()
    wait_until(lambda: active(second) == active(first) == 0, "they never ended")


def test_new_frontend_restores_cached_blocks_from_durable_events(
    open_clusters: list[RoutedCluster], tmp_path: Path
) -> None:
    with NatsServer(tmp_path, f"jetstream {{ store_dir: {tmp_path / 'js'}, max_file_store: 12GB }}") as server:
        durable = ("--durable-kv-events",)

        def frontend() -> RoutedCluster:
            cluster = RoutedCluster(tmp_path, *KV, *durable, "--router-snapshot-threshold", "4")
            open_clusters.append(cluster)
            return cluster

        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("NATS_SERVER", server.url)
            first = frontend()
            for _ in range(2):
                first.mocker(*QUICK, *durable)
            wait_until(lambda: first.ranks() == 2, "the router does not know both workers")
            holders = first.holders(range(6))
            log = tmp_path / "frontend0.log"
            wait_until(lambda: "uploaded" in log.read_text(), "no snapshot was taken")
            held = first.held()
            first.frontend.terminate()
            assert first.frontend.wait(60) == 0
            second = frontend()
            wait_until(lambda: second.workers() == second.ranks() == 2, "the workers never appeared")
            # No request before all workers are discovered: it would add blocks to another worker.
            wait_until(lambda: second.has_all(held), "the new frontend never learnt of the blocks")
            assert second.strays(holders) == {}


def test_session_is_routed_to_one_worker_by_both_frontends(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    affinity = ("--router-session-affinity-ttl-secs", "600", "--enable-session-prefix-index")
    first = make_cluster(open_clusters, tmp_path, *affinity, workers=0)
    second = make_cluster(open_clusters, tmp_path, *affinity, workers=0)
    for _ in range(2):
        first.mocker(*QUICK)
    wait_until(lambda: first.ranks() == second.ranks() == 2, "the routers do not know both workers")

    def is_shared(number: int) -> bool:
        """Return whether a new session's turns go to one worker, although their prompts have nothing in common."""
        header = {"x-dynamo-session-id": f"s{number}-{len(seen)}"}
        seen.append(first.chat(100 * number, headers=header)["worker_id"])
        return all(second.chat(100 * number + turn, headers=header)["worker_id"] == seen[-1] for turn in range(1, 7))

    seen: list[int] = []
    for number in range(3):
        wait_until(partial(is_shared, number), "the second frontend sent the session elsewhere")
    (sessions,) = second.http.get("/routing/sessions").json()["models"]
    assert sessions["sessions"] >= 3
    assert len(sessions["shown"][0]["prompts"]) == 6
    assert "--enable-session-prefix-index" not in second.http.get("/routing/sessions").text


def test_routing_constraints_select_the_topology_zone(
    open_clusters: list[RoutedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    estimated = ("--router-prefill-load-model", "ais", "--ais-backend", "vllm", "--ais-system", "h200_sxm")
    cluster = make_cluster(open_clusters, tmp_path, *estimated, "--ais-model-path", str(tmp_path), workers=0)
    for zone in ("a", "b"):
        mount = tmp_path / zone
        mount.mkdir()
        (mount / "zone").write_text(zone)
        monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(mount))
        cluster.mocker(*QUICK)
    wait_until(lambda: cluster.ranks() == 2, "the router does not know both workers")

    def place(zone: str, number: int) -> int:
        wanted = {"required_taints": [f"dynamo.topology/zone={zone}"]}
        reported = {"extra_fields": ["routing", "timing"], "routing_constraints": wanted}
        return int(cluster.chat(number, nvext=reported)["worker_id"])

    found = {zone: {place(zone, number) for number in range(4)} for zone in ("a", "b")}
    assert len(found["a"]) == len(found["b"]) == 1
    assert found["a"] != found["b"]
    unmatched = {"routing_constraints": {"required_taints": ["dynamo.topology/zone=c"]}}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "nvext": unmatched}
    refused = cluster.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "no_matching_worker")
    assert "lacks dynamo.topology/zone=c" in refused.text


def test_frontend_routes_with_the_index_of_another_frontend(open_clusters: list[RoutedCluster], tmp_path: Path) -> None:
    telling = make_cluster(open_clusters, tmp_path, "--serve-indexer")
    asking = make_cluster(open_clusters, tmp_path, "--use-remote-indexer", workers=0)
    wait_until(lambda: asking.ranks() == 2, "the router does not know both workers")
    holders = telling.holders(range(6))

    def agrees() -> bool:
        found = {number: asking.chat(number) for number in holders}
        return all(
            reported["worker_id"] == holders[number] and reported["device_blocks"] for number, reported in found.items()
        )

    wait_until(agrees, "the other frontend never heard of the blocks")
