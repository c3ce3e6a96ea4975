"""Leader election: never two leaders, and always one again after faults."""

import asyncio
import copy
import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import ObjectKind
from dynamo.k8s.leader import LeaderElection, LeaseName, LeaseTimings, process_identity
from dynamo.protocols.kubernetes.common import KubeObject

AT = LeaseName("ns", "operator")


class LeaseServer:
    """One lease with optimistic concurrency."""

    def __init__(self) -> None:
        self.stored: KubeObject | None = None
        self.revision = 0
        self.writes = 0

    def put(self, value: KubeObject | None) -> KubeObject:
        self.revision += 1
        self.writes += 1
        value = copy.deepcopy(value)
        if value is not None:
            value["metadata"]["resourceVersion"] = str(self.revision)
        self.stored = value
        return copy.deepcopy(value) or {}

    @property
    def spec(self) -> KubeObject:
        assert self.stored is not None
        spec: KubeObject = self.stored["spec"]
        return spec


class LeaseClient:
    """Connection of one candidate, which fails or hangs as a test sets."""

    def __init__(self, server: LeaseServer) -> None:
        self.server = server
        self.failure: Exception | None = None
        self.response_lost = False
        self.open = asyncio.Event()
        self.open.set()

    async def _pass(self) -> None:
        await self.open.wait()
        if self.failure:
            raise self.failure

    async def get(self, kind: ObjectKind, name: str, namespace: str | None = None) -> KubeObject | None:
        await self._pass()
        return copy.deepcopy(self.server.stored)

    async def create(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        await self._pass()
        if self.server.stored is not None:
            raise KubeRefused(409, "AlreadyExists", "exists")
        return self._responded(self.server.put(value))

    async def replace(self, kind: ObjectKind, value: KubeObject, namespace: str | None = None) -> KubeObject:
        await self._pass()
        stored = self.server.stored
        if stored is None:
            raise KubeRefused(404, "NotFound", "gone")
        if stored["metadata"]["resourceVersion"] != value["metadata"]["resourceVersion"]:
            raise KubeRefused(409, "Conflict", "the object has been modified")
        return self._responded(self.server.put(value))

    def _responded(self, value: KubeObject) -> KubeObject:
        if self.response_lost:
            raise KubeUnavailable("no response")
        return value


class Candidate:
    """A candidate with a clock and a connection of its own."""

    def __init__(self, server: LeaseServer, name: str, skew_s: float = 0.0) -> None:
        self.clock = ManualClock(start=1000.0 * (1 + len(name)), wall=1_700_000_000.0 + skew_s)
        self.client = LeaseClient(server)
        self.lost = 0
        self.election = LeaderElection(self.client, AT, name, on_lost=self._on_lost, clock=self.clock)
        self.election.start()

    def _on_lost(self) -> None:
        self.lost += 1

    @property
    def is_leader(self) -> bool:
        return self.election.is_leader


class Candidates:
    """Candidates whose clocks run at the same rate."""

    def __init__(self, *names: str) -> None:
        self.server = LeaseServer()
        self.all = {name: Candidate(self.server, name) for name in names}

    async def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        await turns(20)
        for _ in range(round(seconds / step_s)):
            for one in self.all.values():
                one.clock.advance(step_s)
            await turns(20)
            assert len(self.leaders) <= 1, "two leaders at the same time"

    @property
    def leaders(self) -> list[str]:
        return [name for name, one in self.all.items() if one.is_leader]

    async def end(self) -> None:
        for one in self.all.values():
            one.client.open.set()
            await one.election.close()


async def test_first_candidate_creates_the_lease_and_renews_it() -> None:
    candidates = Candidates("a")
    await asyncio.wait_for(candidates.all["a"].election.wait_until_leader(), 5)
    assert candidates.server.stored == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "operator", "namespace": "ns", "resourceVersion": "1"},
        "spec": {
            "holderIdentity": "a",
            "leaseDurationSeconds": 15,
            "acquireTime": "2023-11-14T22:13:20.000000Z",
            "renewTime": "2023-11-14T22:13:20.000000Z",
            "leaseTransitions": 0,
        },
    }
    await candidates.pass_time(60)
    assert candidates.leaders == ["a"]
    assert candidates.server.writes == 31
    assert candidates.server.spec["renewTime"] == "2023-11-14T22:14:20.000000Z"
    assert candidates.server.spec["acquireTime"] == "2023-11-14T22:13:20.000000Z"
    await candidates.end()


async def test_other_candidates_wait_while_the_leader_renews() -> None:
    candidates = Candidates("a", "bb", "ccc")
    await candidates.pass_time(120)
    (leader,) = candidates.leaders
    assert [one.lost for one in candidates.all.values()] == [0, 0, 0]
    assert {one.election.leader for one in candidates.all.values()} == {leader}
    await candidates.end()


async def test_released_lease_is_acquired_within_a_retry_interval() -> None:
    candidates = Candidates("a")
    await candidates.pass_time(1)
    candidates.all["bb"] = Candidate(candidates.server, "bb")
    await candidates.pass_time(5)
    released = candidates.all.pop("a")
    await released.election.close()
    assert (candidates.server.spec["holderIdentity"], released.is_leader, released.lost) == ("", False, 0)
    await candidates.pass_time(4.5)
    assert candidates.leaders == ["bb"]
    assert candidates.server.spec["leaseTransitions"] == 1
    await candidates.end()


async def test_lease_of_a_dead_leader_is_acquired_after_its_duration_without_a_change() -> None:
    candidates = Candidates("bb")
    held = {"holderIdentity": "dead", "leaseDurationSeconds": 15, "leaseTransitions": 4, "strategy": "x"}
    candidates.server.put({"metadata": {"name": "operator"}, "spec": held})
    await candidates.pass_time(14.5)
    assert candidates.leaders == []
    await candidates.pass_time(6)
    assert candidates.leaders == ["bb"]
    assert (candidates.server.spec["leaseTransitions"], candidates.server.spec["strategy"]) == (5, "x")
    await candidates.end()


async def test_times_in_the_lease_are_ignored() -> None:
    candidates = Candidates()
    candidates.all["a"] = Candidate(candidates.server, "a", skew_s=-86_400.0)
    await candidates.pass_time(2)
    candidates.all["bb"] = Candidate(candidates.server, "bb", skew_s=86_400.0)
    await candidates.pass_time(60)
    assert candidates.leaders == ["a"]
    await candidates.end()


async def test_metadata_change_does_not_renew_the_lease() -> None:
    candidates = Candidates("bb")
    candidates.server.put({"metadata": {"name": "operator"}, "spec": {"holderIdentity": "dead"}})
    for index in range(10):
        await candidates.pass_time(2)
        stored = candidates.server.stored
        assert stored is not None
        candidates.server.put({**stored, "metadata": {**stored["metadata"], "labels": {"i": str(index)}}})
    await candidates.pass_time(3)
    assert candidates.leaders == ["bb"]
    await candidates.end()


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": ""}, {"holderIdentity": None, "leaseDurationSeconds": None}])
async def test_lease_without_a_holder_is_acquired_at_once(spec: KubeObject) -> None:
    candidates = Candidates("a")
    candidates.server.put({"metadata": {"name": "operator"}, "spec": spec})
    await candidates.pass_time(5)
    assert candidates.leaders == ["a"]
    await candidates.end()


async def test_leader_without_server_loses_leadership_after_the_renewal_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    candidates = Candidates("a", "bb")
    await candidates.pass_time(10)
    (name,) = candidates.leaders
    leader = candidates.all[name]
    leader.client.failure = KubeUnavailable("gone")
    await candidates.pass_time(8)
    assert candidates.leaders == [name]
    await candidates.pass_time(2.5)
    assert (candidates.leaders, leader.lost) == ([], 1)
    await candidates.pass_time(12)
    assert candidates.leaders == [({"a", "bb"} - {name}).pop()]
    assert leader.lost == 1
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == [
        "failed to update lease ns/operator: gone",
        "lost lease ns/operator: gone",
    ]
    await candidates.end()


async def test_hanging_leader_loses_leadership_before_another_candidate_leads() -> None:
    candidates = Candidates("a", "bb")
    await candidates.pass_time(10)
    (name,) = candidates.leaders
    candidates.all[name].client.open.clear()
    await candidates.pass_time(30)
    assert candidates.leaders == [({"a", "bb"} - {name}).pop()]
    candidates.all[name].client.open.set()
    await candidates.pass_time(5)
    assert candidates.all[name].lost == 1
    await candidates.end()


async def test_leader_with_a_stolen_lease_stops_at_its_next_renewal() -> None:
    candidates = Candidates("a")
    await candidates.pass_time(1)
    stored = candidates.server.stored
    assert stored is not None
    candidates.server.put({**stored, "spec": {**stored["spec"], "holderIdentity": "thief"}})
    await candidates.pass_time(4)
    assert (candidates.leaders, candidates.all["a"].lost) == ([], 1)
    await candidates.end()
    assert candidates.server.spec["holderIdentity"] == "thief"


async def test_deleted_lease_is_created_again_by_its_leader() -> None:
    candidates = Candidates("a")
    await candidates.pass_time(1)
    candidates.server.put(None)
    await candidates.pass_time(4)
    assert (candidates.leaders, candidates.all["a"].lost) == (["a"], 0)
    await candidates.end()


async def test_lease_that_cannot_be_released_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    candidates = Candidates("a")
    await candidates.pass_time(1)
    candidates.all["a"].client.failure = KubeUnavailable("gone")
    await candidates.end()
    assert "failed to release lease ns/operator: gone" in caplog.text
    assert candidates.leaders == []


async def test_candidate_without_a_lease_releases_none() -> None:
    candidates = Candidates("a")
    await candidates.end()
    assert candidates.server.writes == 0


async def test_malformed_lease_does_not_delay_the_loss_of_the_leadership() -> None:
    candidates = Candidates("a")
    await candidates.pass_time(1)
    candidates.all["a"].client.failure = KeyError("metadata")
    await candidates.pass_time(11)
    assert (candidates.leaders, candidates.all["a"].lost) == ([], 1)
    candidates.all["a"].client.failure = None
    await candidates.pass_time(20)
    assert candidates.leaders == ["a"]
    await candidates.end()


def test_timings_that_allow_two_leaders_are_refused() -> None:
    for wrong in (
        {"renew_deadline_s": 15.0},
        {"retry_s": 9.0},
        {"retry_s": 0.0},
        {"duration_s": 10},
    ):
        with pytest.raises(ConfigError, match="the duration must be longer than the deadline"):
            LeaseTimings(**wrong)


def test_identity_is_unique_and_begins_with_the_host() -> None:
    first, second = process_identity(), process_identity()
    assert first != second
    assert first.startswith(f"{socket.gethostname()}_")


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["fail", "hang", "lose", "heal", "crash", "release", "start"]), st.integers(0, 2)),
    st.tuples(st.just("pass"), st.integers(1, 20)),
)


@given(st.lists(ACTIONS, max_size=12))
def test_at_most_one_candidate_leads_at_any_time_and_one_does_after_any_faults(actions: list[tuple[str, int]]) -> None:
    async def run() -> None:
        candidates = Candidates()
        started = 0
        for action, number in [("start", 0), ("start", 1), *actions, ("start", 2)]:
            name = (sorted(candidates.all) or [""])[number % max(1, len(candidates.all))]
            match action:
                case "pass":
                    await candidates.pass_time(number, 1.0)
                case "start":
                    started += 1
                    candidates.all[f"c{started}"] = Candidate(candidates.server, f"c{started}", 1000.0 * number)
                case "release" if name:
                    candidates.all[name].client.open.set()
                    await candidates.all.pop(name).election.close()
                case "crash" if name:
                    crashed = candidates.all.pop(name)
                    crashed.client.failure = KubeUnavailable("crashed")
                    crashed.client.open.set()
                    await crashed.election.close()
                case _ if name:
                    client = candidates.all[name].client
                    client.failure = KubeUnavailable("gone") if action == "fail" else None
                    client.response_lost = action == "lose"
                    (client.open.clear if action == "hang" else client.open.set)()
            await candidates.pass_time(0.5)
        for one in candidates.all.values():
            one.client.failure, one.client.response_lost = None, False
            one.client.open.set()
        await candidates.pass_time(30)
        assert len(candidates.leaders) == 1
        await candidates.end()

    asyncio.run(run())
