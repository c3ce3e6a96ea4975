"""Contact: retried failures, immediate errors, and the log of an outage."""

import asyncio
import ssl

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.runtime.discovery.contact import REMIND_S, Contact, fault_of
from dynamo.runtime.transports.etcd.options import Address, EtcdOptions
from dynamo.runtime.transports.etcd.protocol import INVALID_ARGUMENT, EtcdRefused, EtcdUnavailable

ONE, OTHER = Address("one", 1, is_tls=True), Address("other", 2, is_tls=True)
AWAY = EtcdUnavailable("no answer")
REFUSED = EtcdRefused(INVALID_ARGUMENT, "user name is empty")


def contact(clock: ManualClock, timeout_s: float = 60.0) -> Contact:
    return Contact(EtcdOptions(addresses=(ONE, OTHER), startup_timeout_s=timeout_s), clock)


async def test_etcd_contact_resumes_when_a_member_answers() -> None:
    made = contact(ManualClock())
    waiting = asyncio.ensure_future(made.wait())
    await turns()
    assert not waiting.done()
    made.met("lease kept")
    await waiting
    made.lost(ONE, AWAY)
    await made.wait()


async def test_etcd_contact_counts_startup_time_from_the_first_attempt() -> None:
    clock = ManualClock()
    made = contact(clock, timeout_s=60.0)
    made.lost(ONE, AWAY)
    clock.advance(61)
    with pytest.raises(
        ConfigError, match=r"ETCD_ENDPOINTS=https://one:1,https://other:2: no response from etcd within 60 s .*answer"
    ):
        await made.wait()


async def test_etcd_contact_fails_at_once_when_every_member_refuses() -> None:
    made = contact(ManualClock())
    made.lost(ONE, REFUSED)
    waiting = asyncio.ensure_future(made.wait())
    await turns()
    assert not waiting.done()
    made.lost(OTHER, REFUSED)
    with pytest.raises(
        ConfigError, match="ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: rejected by https://one:1: user name"
    ):
        await waiting


async def test_etcd_contact_retries_a_member_that_does_not_answer() -> None:
    made = contact(ManualClock())
    made.lost(ONE, REFUSED)
    made.lost(OTHER, AWAY)
    made.lost(ONE, REFUSED)
    waiting = asyncio.ensure_future(made.wait())
    await turns()
    assert not waiting.done()
    waiting.cancel()


def test_etcd_contact_logs_the_start_and_the_end_of_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    made = contact(clock)
    made.met("")
    for _ in range(3):
        made.lost(ONE, AWAY)
        clock.advance(20)
    made.met("lease kept")
    assert caplog.messages == [
        "etcd unreachable (https://one:1: no answer): keeping the last view",
        "etcd reachable again after 60.0 s: lease kept",
    ]


def test_etcd_contact_logs_periodically_while_waiting(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    made = contact(clock)
    for _ in range(21):
        made.lost(ONE, AWAY)
        clock.advance(REMIND_S / 10)
    assert caplog.messages == ["waiting for etcd (ETCD_ENDPOINTS), at most 60 s: https://one:1: no answer"] * 3


def test_etcd_contact_retries_transient_errors() -> None:
    assert fault_of(ONE, AWAY) is None
    untrusted = ssl.SSLCertVerificationError()
    untrusted.verify_message = "self-signed certificate"
    assert "ETCD_AUTH_CA" in str(fault_of(ONE, untrusted))
