"""Discovery in etcd: one lease and one identity through every outage, and views that outlast them."""

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.settle import turns, until
from tests.unit.runtime.discovery.etcd_fake import FakeEtcd, FakeMember, Kept

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, InvalidArgument, WorkerUnavailable
from dynamo.runtime.discovery.base import Change, Delete, Put, RemoteDiscovery, Synced, Watch
from dynamo.runtime.discovery.etcd import RELIST_S, REPAIR_S, EtcdDiscovery
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions
from dynamo.runtime.transports.etcd.protocol import (
    INVALID_ARGUMENT,
    PERMISSION_DENIED,
    EtcdRefused,
    EtcdUnavailable,
)

BUCKET = "v1/instances"
TTL_S = 10
ID = 0x2040A1F9995C8D05
ADDRESSES = tuple(Address("etcd", port, is_tls=False) for port in (1, 2, 3))


class EtcdHarness:
    """In-memory etcd with a clock, and the processes that use it."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd(ttl=TTL_S)
        self.clock = ManualClock()
        self.members: list[EtcdDiscovery] = []

    def join(
        self, id: int = ID, addresses: tuple[Address, ...] = ADDRESSES[:1], startup_timeout_s: float = 60.0
    ) -> EtcdDiscovery:
        options = EtcdOptions(addresses=addresses, lease_ttl_s=TTL_S, startup_timeout_s=startup_timeout_s)
        member = EtcdDiscovery(id, options, clock=self.clock, make_member=self.etcd.member)
        self.members.append(member)
        return member

    async def settle(self) -> None:
        """Run all events that are due now."""
        await turns(80)

    async def pass_time(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            await self.settle()

    async def close(self) -> None:
        self.etcd.rise()
        self.etcd.errors.clear()
        for member in self.members:
            await member.close()


@pytest.fixture
async def harness() -> AsyncIterator[EtcdHarness]:
    made = EtcdHarness()
    yield made
    await made.close()


def name(key: str) -> bytes:
    return f"{BUCKET}/{key}".encode()


async def received_changes(harness: EtcdHarness, watch: Watch) -> list[Change]:
    """The changes that a watcher receives now."""
    received: list[Change] = []
    await harness.settle()
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0):
                received.append(await anext(watch))
    return received


# Identity ----------------------------------------------------------------------------------------------------------


async def test_etcd_discovery_uses_one_lease_whose_id_is_its_instance_id(harness: EtcdHarness) -> None:
    await harness.join().put(BUCKET, "a/b/c/1", b"here")
    assert harness.etcd.leases == {ID}
    assert harness.etcd.records == {b"v1/instances/a/b/c/1": Kept(b"here", ID)}


async def test_etcd_discovery_renews_its_lease_five_times_per_ttl(harness: EtcdHarness) -> None:
    await harness.join().put(BUCKET, "k", b"v")
    harness.etcd.calls.clear()
    await harness.pass_time(2 * TTL_S)
    assert harness.etcd.calls.count("renew") == 10
    assert set(harness.etcd.calls) == {"renew", "held_by"}


async def test_etcd_discovery_reacquires_a_lost_lease_and_rewrites_its_records(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.put(BUCKET, "a", b"1")
    await member.put("v1/mdc", "a", b"card")
    kept = dict(harness.etcd.records)
    harness.etcd.expire(ID)
    assert harness.etcd.records == {}
    await harness.pass_time(3)
    assert (harness.etcd.records, harness.etcd.leases) == (kept, {ID})


async def test_etcd_discovery_adopts_a_lease_whose_grant_response_was_lost(harness: EtcdHarness) -> None:
    harness.etcd.leases.add(ID)
    await harness.join().put(BUCKET, "k", b"v")
    assert harness.etcd.records[name("k")] == Kept(b"v", ID)


async def test_etcd_discovery_revokes_its_lease_on_close(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.put(BUCKET, "k", b"v")
    await member.close()
    assert (harness.etcd.records, harness.etcd.leases) == ({}, set())


async def test_renewal_of_a_lease_that_close_has_revoked_is_no_outage(
    harness: EtcdHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = harness.join()
    await member.put(BUCKET, "k", b"v")
    revoke = FakeMember.revoke

    async def revoke_slowly(etcd: FakeMember, lease_id: int) -> None:
        await revoke(etcd, lease_id)
        harness.etcd.calls.clear()
        await harness.pass_time(TTL_S)

    monkeypatch.setattr(FakeMember, "revoke", revoke_slowly)
    await member.close()
    assert harness.etcd.calls.count("renew") == 1
    assert not caplog.messages


async def test_etcd_discovery_closes_during_an_outage(harness: EtcdHarness, caplog: pytest.LogCaptureFixture) -> None:
    member = harness.join()
    await member.put(BUCKET, "k", b"v")
    watch = member.watch(BUCKET)
    assert await received_changes(harness, watch) == [Put("k", b"v"), Synced()]
    harness.etcd.fall()
    await member.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    assert not [message for message in caplog.messages if "did not end" in message]


# Outages -----------------------------------------------------------------------------------------------------------


async def test_etcd_discovery_keeps_views_during_an_outage(harness: EtcdHarness) -> None:
    owner, reader = harness.join(1), harness.join(2)
    await owner.put(BUCKET, "k", b"v")
    watch = reader.watch(BUCKET)
    assert await received_changes(harness, watch) == [Put("k", b"v"), Synced()]
    harness.etcd.fall()
    await harness.pass_time(20 * TTL_S)
    assert not reader.is_reachable
    assert reader.is_sound
    assert await received_changes(harness, watch) == []
    assert await reader.snapshot(BUCKET) == {"k": b"v"}


async def test_etcd_discovery_resumes_watches_after_an_outage(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("old"), b"1")
    watch = reader.watch(BUCKET)
    assert await received_changes(harness, watch) == [Put("old", b"1"), Synced()]
    harness.etcd.fall()
    await harness.pass_time(1)
    harness.etcd.put(name("new"), b"2")
    harness.etcd.calls.clear()
    harness.etcd.rise()
    await harness.pass_time(3)
    assert await received_changes(harness, watch) == [Put("new", b"2")]
    assert "list" not in harness.etcd.calls
    assert "grant" not in harness.etcd.calls


async def test_etcd_discovery_keeps_views_when_etcd_loses_its_data(harness: EtcdHarness) -> None:
    owner, reader = harness.join(1), harness.join(2)
    await owner.put(BUCKET, "k", b"v")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(1)
    harness.etcd.wipe()
    harness.etcd.rise()
    await harness.pass_time(3 * TTL_S)
    assert harness.etcd.records == {name("k"): Kept(b"v", 1)}
    assert await received_changes(harness, watch) == []


async def test_etcd_discovery_lists_again_when_etcd_restarted_with_a_higher_revision(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("old"), b"1")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(1)
    harness.etcd.wipe()
    harness.etcd.put(name("new"), b"2")
    for number in range(20):
        harness.etcd.put(b"elsewhere/%d" % number, b"")
    harness.etcd.rise()
    await harness.pass_time(3)
    assert await received_changes(harness, watch) == [Put("new", b"2")]
    await harness.pass_time(TTL_S)
    assert await received_changes(harness, watch) == [Delete("old")]


@pytest.mark.parametrize("is_together", [True, False])
async def test_etcd_discovery_loses_no_change_when_a_watch_breaks(harness: EtcdHarness, is_together: bool) -> None:
    watch = harness.join().watch(BUCKET)
    assert await received_changes(harness, watch) == [Synced()]
    harness.etcd.breaks_after_one = True
    if is_together:
        harness.etcd.put_together({name("a"): b"1", name("b"): b"2"})
    else:
        harness.etcd.put(name("a"), b"1")
        harness.etcd.put(name("b"), b"2")
    assert await received_changes(harness, watch) == [Put("a", b"1")]
    harness.etcd.calls.clear()
    await harness.pass_time(3)
    assert await received_changes(harness, watch) == [Put("b", b"2")]
    assert "list" not in harness.etcd.calls


async def test_etcd_discovery_keeps_views_when_leases_expire_during_an_outage(harness: EtcdHarness) -> None:
    owner, reader = harness.join(1), harness.join(2)
    await owner.put(BUCKET, "k", b"v")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(2 * TTL_S)
    harness.etcd.rise()
    harness.etcd.expire(1)  # The reader's lease still exists: its watch continues and receives the deletion.
    await harness.pass_time(3 * TTL_S)
    assert harness.etcd.records == {name("k"): Kept(b"v", 1)}
    assert await received_changes(harness, watch) == []


async def test_etcd_discovery_removes_instances_that_do_not_return_after_an_outage(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("dead"), b"1")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(1)
    harness.etcd.delete(name("dead"))
    harness.etcd.rise()
    await harness.pass_time(TTL_S - 2)
    assert await received_changes(harness, watch) == []
    assert await reader.snapshot(BUCKET) == {"dead": b"1"}
    await harness.pass_time(4)
    assert await received_changes(harness, watch) == [Delete("dead")]
    assert await reader.snapshot(BUCKET) == {}


async def test_etcd_discovery_removes_an_instance_at_once_without_an_outage(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("k"), b"1")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.delete(name("k"))
    assert await received_changes(harness, watch) == [Delete("k")]


async def test_etcd_discovery_applies_changes_of_an_outage_afterwards(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.put(BUCKET, "leaves", b"1")
    watch = member.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(1)
    await member.put(BUCKET, "comes", b"2")
    await member.delete(BUCKET, "leaves")
    assert await received_changes(harness, watch) == [Delete("leaves")], "its owner ought to know"
    harness.etcd.rise()
    await harness.pass_time(3)
    assert harness.etcd.records == {name("comes"): Kept(b"2", ID)}
    assert await received_changes(harness, watch) == [Put("comes", b"2")]


async def test_etcd_discovery_writes_the_last_value_of_a_record_changed_during_its_write(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.connect()
    first = asyncio.ensure_future(member.put(BUCKET, "k", b"1"))
    await until(lambda: "put" in harness.etcd.calls)
    await member.put(BUCKET, "k", b"2")
    assert harness.etcd.calls.count("put") == 2
    assert harness.etcd.records == {name("k"): Kept(b"2", ID)}
    await first


async def test_etcd_discovery_uses_the_next_member_when_one_fails(harness: EtcdHarness) -> None:
    member = harness.join(addresses=ADDRESSES)
    await member.put(BUCKET, "k", b"v")
    for port in (1, 2, 3):
        harness.etcd.fall(port)
        await harness.pass_time(3)
        assert member.is_reachable
        assert harness.etcd.leases == {ID}
        harness.etcd.rise()


async def test_etcd_discovery_logs_an_outage_and_its_end_once(
    harness: EtcdHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.join().put(BUCKET, "k", b"v")
    harness.etcd.fall()
    await harness.pass_time(6 * TTL_S)
    harness.etcd.rise()
    await harness.pass_time(5)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING]
    assert "keeping the last view" in caplog.messages[0]
    assert "etcd reachable again" in caplog.messages[1]


async def test_etcd_discovery_backs_off_up_to_the_renewal_interval(harness: EtcdHarness) -> None:
    await harness.join().put(BUCKET, "k", b"v")
    harness.etcd.fall()
    await harness.pass_time(TTL_S, step_s=0.05)
    harness.etcd.calls.clear()
    await harness.pass_time(100, step_s=0.05)
    assert 50 <= harness.etcd.calls.count("connect") <= 105


# Being right again -------------------------------------------------------------------------------------------------


async def test_etcd_discovery_lists_again_after_compaction(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("k"), b"1")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.fall()
    await harness.pass_time(1)
    harness.etcd.put(name("k"), b"2")
    harness.etcd.put(name("l"), b"3")
    harness.etcd.compact()
    harness.etcd.rise()
    await harness.pass_time(3)
    assert await received_changes(harness, watch) == [Put("k", b"2"), Put("l", b"3")]


async def test_etcd_discovery_corrects_a_wrong_view_at_the_next_listing(harness: EtcdHarness) -> None:
    reader = harness.join()
    harness.etcd.put(name("k"), b"1")
    watch = reader.watch(BUCKET)
    await received_changes(harness, watch)
    harness.etcd.records[name("silent")] = Kept(b"2", 0)
    del harness.etcd.records[name("k")]
    await harness.pass_time(1.3 * RELIST_S)
    assert sorted(map(str, await received_changes(harness, watch))) == sorted(
        map(str, [Delete("k"), Put("silent", b"2")])
    )
    harness.etcd.put(name("k"), b"3")
    assert await received_changes(harness, watch) == [Put("k", b"3")]


@pytest.mark.parametrize("is_removed", [True, False])
async def test_owner_writes_a_record_again_that_another_client_removed_or_overwrote(
    harness: EtcdHarness, caplog: pytest.LogCaptureFixture, is_removed: bool
) -> None:
    await harness.join().put(BUCKET, "k", b"v")
    if is_removed:
        harness.etcd.delete(name("k"))
    else:
        harness.etcd.put(name("k"), b"garbage")
    await harness.pass_time(1.3 * REPAIR_S)
    assert harness.etcd.records == {name("k"): Kept(b"v", ID)}
    assert caplog.messages == ["record v1/instances/k was removed or overwritten by another client; writing it again"]


async def test_etcd_discovery_reports_a_denied_watch_and_keeps_serving(
    harness: EtcdHarness, caplog: pytest.LogCaptureFixture
) -> None:
    member = harness.join()
    await member.put(BUCKET, "k", b"v")
    harness.etcd.errors.append(EtcdRefused(PERMISSION_DENIED, "permission denied"))
    watch = member.watch(BUCKET)
    assert await received_changes(harness, watch) == []
    assert member.is_reachable
    assert caplog.messages == ["etcd denied watching v1/instances (ETCD_AUTH_USERNAME): permission denied"]
    await harness.pass_time(11)
    assert await received_changes(harness, watch) == [Put("k", b"v"), Synced()]


async def test_etcd_discovery_watcher_crash_is_visible_and_restarted(
    harness: EtcdHarness, caplog: pytest.LogCaptureFixture
) -> None:
    reader = harness.join()
    await reader.connect()
    harness.etcd.errors.append(RuntimeError("a bug"))
    watch = reader.watch(BUCKET)
    await harness.settle()
    assert not reader.is_sound
    assert any("failed; restarting it" in message for message in caplog.messages)
    harness.etcd.put(name("k"), b"1")
    await harness.pass_time(3)
    assert reader.is_sound
    assert await received_changes(harness, watch) == [Put("k", b"1"), Synced()]


async def test_etcd_discovery_ignores_keys_that_are_not_text(harness: EtcdHarness) -> None:
    harness.etcd.put(BUCKET.encode() + b"/\xff", b"1")
    reader = harness.join()
    watch = reader.watch(BUCKET)
    assert await received_changes(harness, watch) == [Synced()]
    harness.etcd.put(BUCKET.encode() + b"/\xfe", b"1")
    harness.etcd.put(name("k"), b"1")
    assert await received_changes(harness, watch) == [Put("k", b"1")]
    assert await reader.snapshot(BUCKET) == {"k": b"1"}


# Starting, and being refused ---------------------------------------------------------------------------------------


async def test_etcd_discovery_startup_error_names_the_settings(harness: EtcdHarness) -> None:
    harness.etcd.fall()
    member = harness.join(startup_timeout_s=0.02)
    message = (
        r"ETCD_ENDPOINTS=http://etcd:1: no response from etcd .*ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS\): .*no answer"
    )
    with pytest.raises(ConfigError, match=message):
        await member.connect()
    with pytest.raises(ConfigError, match=message):
        await member.put(BUCKET, "k", b"v")


async def test_etcd_discovery_logs_the_awaited_condition(
    harness: EtcdHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.etcd.fall()
    watch = harness.join().watch(BUCKET)
    await harness.pass_time(15)
    assert len(caplog.messages) == 2
    assert "waiting for etcd (ETCD_ENDPOINTS)" in caplog.messages[0]
    harness.etcd.rise()
    await harness.pass_time(5)
    assert await received_changes(harness, watch) == [Synced()]


def untrusted() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError()
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("make_error", "setting"),
    [
        (lambda: EtcdRefused(INVALID_ARGUMENT, "user name is empty"), "ETCD_AUTH_USERNAME"),
        (untrusted, "ETCD_AUTH_CA.*self-signed"),
    ],
)
async def test_etcd_discovery_reports_user_errors_at_once(
    harness: EtcdHarness, make_error: Callable[[], Exception], setting: str
) -> None:
    harness.etcd.errors.append(make_error())
    member = harness.join()
    with pytest.raises(ConfigError, match=setting):
        await member.connect()
    await harness.pass_time(3)
    await member.put(BUCKET, "k", b"v")  # It was mended meanwhile.
    assert name("k") in harness.etcd.records


async def test_etcd_discovery_requires_one_reachable_member(harness: EtcdHarness) -> None:
    harness.etcd.errors.append(untrusted())
    member = harness.join(addresses=ADDRESSES)
    connecting = asyncio.ensure_future(member.connect())
    await harness.pass_time(1)
    await connecting
    assert member.is_reachable


async def test_etcd_discovery_waits_when_an_error_turns_into_an_outage(harness: EtcdHarness) -> None:
    harness.etcd.errors.append(untrusted())
    member = harness.join()
    with pytest.raises(ConfigError, match="ETCD_AUTH_CA"):
        await member.connect()
    harness.etcd.fall()
    await harness.pass_time(1)
    connecting = asyncio.ensure_future(member.connect())
    await harness.settle()
    assert not connecting.done()
    harness.etcd.rise()
    await harness.pass_time(3)
    await connecting


@pytest.mark.parametrize(("code", "kind"), [(INVALID_ARGUMENT, InvalidArgument), (PERMISSION_DENIED, ConfigError)])
async def test_etcd_discovery_raises_a_refused_record_to_its_writer_only(
    harness: EtcdHarness, code: int, kind: type[Exception]
) -> None:
    member = harness.join()
    await member.put(BUCKET, "good", b"1")
    harness.etcd.errors.append(EtcdRefused(code, "request is too large"))
    with pytest.raises(kind, match=f"{BUCKET}/bad: request is too large"):
        await member.put(BUCKET, "bad", b"2")
    assert member.is_reachable
    harness.etcd.expire(ID)
    await harness.pass_time(3)
    assert harness.etcd.records == {name("good"): Kept(b"1", ID)}


async def test_etcd_discovery_snapshot_without_a_view_is_an_error(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.connect()
    harness.etcd.errors.append(EtcdUnavailable("no answer"))
    with pytest.raises(WorkerUnavailable, match="unreachable"):
        await member.snapshot(BUCKET)


async def test_etcd_discovery_describes_its_state(harness: EtcdHarness, tmp_path: str) -> None:
    assert isinstance(harness.join(), RemoteDiscovery)
    assert not isinstance(FileDiscovery(str(tmp_path)), RemoteDiscovery)


async def test_etcd_discovery_exposes_its_health(harness: EtcdHarness) -> None:
    member = harness.join()
    runtime = DistributedRuntime(None, member, "mem", event_plane="mem")
    gauge = "dynamo_component_discovery_reachable"
    assert f"\n{gauge} 0" in runtime.metrics.render()
    await runtime.connect()
    runtime.set_health_status(True)
    assert f"\n{gauge} 1" in runtime.metrics.render()
    assert runtime.health.is_ready()

    harness.etcd.fall()
    await harness.pass_time(5)
    assert f"\n{gauge} 0" in runtime.metrics.render()
    assert runtime.health.is_ready(), "an outage does not change readiness"
    harness.etcd.rise()
    await harness.pass_time(5)

    harness.etcd.errors.append(RuntimeError("a bug"))
    member.watch(BUCKET)
    await harness.settle()
    assert not runtime.health.is_ready()
    await harness.pass_time(3)
    assert runtime.health.is_ready()
    await runtime.shutdown()


async def test_runtime_instance_id_is_the_etcd_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://nowhere.invalid:1")
    runtime = DistributedRuntime(None, "etcd", "mem", event_plane="mem")
    assert isinstance(runtime.discovery, EtcdDiscovery)
    assert runtime.discovery.lease_id == runtime.instance_id
    await runtime.shutdown()


# All faults together -----------------------------------------------------------------------------------------------

ACTS = ("put", "drop", "fall", "rise", "wipe", "compact", "expire", "wait", "long")


@settings(max_examples=40)
@given(acts=st.lists(st.sampled_from(ACTS), max_size=14), seed=st.integers(0, 2**32))
async def test_etcd_discovery_views_converge_after_any_sequence_of_faults(acts: list[str], seed: int) -> None:
    random.seed(seed)
    harness = EtcdHarness()
    owner, reader = harness.join(1), harness.join(2)
    watch = reader.watch(BUCKET)
    expected: dict[str, bytes] = {}
    await owner.connect()
    for number, act in enumerate(acts):
        match act:
            case "put":
                expected[f"k{number % 4}"] = b"%d" % number
                await owner.put(BUCKET, f"k{number % 4}", b"%d" % number)
            case "drop" if expected:
                key = next(iter(expected))
                del expected[key]
                await owner.delete(BUCKET, key)
            case "fall":
                harness.etcd.fall()
            case "rise":
                harness.etcd.rise()
            case "wipe":
                harness.etcd.fall()
                harness.etcd.wipe()
            case "compact":
                harness.etcd.compact()
            case "expire":
                harness.etcd.expire(1)
            case "wait":
                await harness.pass_time(1)
            case "long":
                await harness.pass_time(2 * TTL_S)
        await harness.settle()
    harness.etcd.rise()
    await harness.pass_time(3 * TTL_S)
    seen: dict[str, bytes] = {}
    for change in await received_changes(harness, watch):
        if isinstance(change, Put):
            seen[change.key] = change.value
        elif isinstance(change, Delete):
            del seen[change.key]
    assert seen == expected
    assert {key: kept.value for key, kept in harness.etcd.records.items()} == {name(k): v for k, v in expected.items()}
    await harness.close()


async def test_persistent_record_has_no_lease(harness: EtcdHarness) -> None:
    member = harness.join()
    await member.put_persistent(BUCKET, "k", b"v")
    assert harness.etcd.records[name("k")] == Kept(b"v", 0)
    await member.close()
    assert harness.etcd.records[name("k")] == Kept(b"v", 0)
