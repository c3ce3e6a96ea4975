"""The requests to etcd, and the decoding of its responses and errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.transports.etcd import protocol
from dynamo.runtime.transports.etcd.protocol import (
    EtcdLease,
    EtcdRefused,
    EtcdUnavailable,
    KeyValue,
    LeaseState,
    Page,
    WatchMessage,
)

HEADER = {"cluster_id": "324952591200643719", "member_id": "3319814642761637952", "revision": "9", "raft_term": "2"}
RECORD = {"key": "YS9i", "create_revision": "2", "mod_revision": "9223372036854775807", "version": "1", "value": "AP8="}


def test_etcd_protocol_encodes_keys_as_base64_and_reads_numbers_as_text() -> None:
    page = protocol.decode(Page, json.dumps({"header": HEADER, "kvs": [RECORD], "more": True, "count": "3"}).encode())
    assert page.kvs == [KeyValue(b"a/b", b"\x00\xff", 2**63 - 1)]
    assert (page.more, page.header.revision) == (True, 9)
    assert json.loads(protocol.encode({"key": b"a/b", "ID": 2**63 - 1})) == {"key": "YS9i", "ID": 2**63 - 1}


def test_etcd_protocol_reads_omitted_fields_as_defaults() -> None:
    assert protocol.decode(Page, json.dumps({"header": HEADER}).encode()).kvs == []
    gone = json.dumps({"result": {"header": HEADER, "ID": "812"}}).encode()
    assert protocol.decode_line(LeaseState, gone) == LeaseState(812, 0)


def test_etcd_protocol_reads_watch_messages() -> None:
    events = [{"kv": RECORD}, {"type": "DELETE", "kv": {"key": "YQ==", "mod_revision": "7"}}]
    line = json.dumps({"result": {"header": HEADER, "events": events}}).encode()
    message = protocol.decode_line(WatchMessage, line)
    assert [(event.type, event.kv.key) for event in message.events] == [("PUT", b"a/b"), ("DELETE", b"a")]
    assert message.events[1].kv.mod_revision == 7


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": "lease already exists", "code": 9, "message": "lease already exists"}, EtcdRefused, "lease"),
        (404, {"code": 5, "message": "requested lease not found", "details": []}, EtcdRefused, "requested"),
        (401, {"code": 16, "message": "invalid auth token"}, EtcdRefused, "invalid"),
        (503, {"code": 14, "message": "etcdserver: no leader"}, EtcdUnavailable, "no leader"),
        (404, "404 page not found", EtcdUnavailable, "HTTP status 404"),
        (502, None, EtcdUnavailable, "HTTP status 502"),
    ],
)
def test_etcd_protocol_distinguishes_request_errors_from_member_errors(
    status: int, body: object, kind: type[Exception], message: str
) -> None:
    data = json.dumps(body).encode() if isinstance(body, dict) else str(body or "").encode()
    error = protocol.refusal(status, data)
    assert type(error) is kind
    assert message in str(error)


@pytest.mark.parametrize(
    "line",
    [
        {"error": {"grpc_code": 16, "http_code": 401, "message": "invalid auth token", "http_status": "Unauthorized"}},
        {"error": {"code": 16, "message": "invalid auth token", "details": []}},
    ],
)
def test_etcd_protocol_reads_stream_errors_of_both_gateway_releases(line: object) -> None:
    with pytest.raises(EtcdRefused, match="invalid auth token") as caught:
        protocol.decode_line(WatchMessage, json.dumps(line).encode())
    assert caught.value.code == protocol.UNAUTHENTICATED


@given(line=st.binary(max_size=60) | st.from_regex(rb"\{.{0,40}\}"))
def test_etcd_protocol_refuses_a_response_that_is_not_from_etcd(line: bytes) -> None:
    with pytest.raises((EtcdUnavailable, EtcdRefused)):
        protocol.decode_line(WatchMessage, line)


@given(prefix=st.binary(min_size=1, max_size=6).filter(lambda text: text[-1] < 255), rest=st.binary(max_size=4))
def test_etcd_protocol_range_covers_exactly_the_prefix(prefix: bytes, rest: bytes) -> None:
    end = protocol.range_end(prefix)
    assert prefix <= prefix + rest < end
    assert (prefix <= rest < end) == rest.startswith(prefix)


def test_etcd_protocol_next_page_starts_after_the_last_key_at_the_same_revision() -> None:
    first = protocol.list_request(b"v1/")
    assert (first["key"], first["range_end"], first["revision"]) == (b"v1/", b"v10", 0)
    assert protocol.list_request(b"v1/", b"v1/a", 7) == {**first, "key": b"v1/a\0", "revision": 7}


@given(ttl_s=st.integers(1, 300), sent_at=st.floats(0, 1e6), answer_s=st.floats(0, 60))
def test_etcd_protocol_schedules_renewal_early_regardless_of_the_response_time(
    ttl_s: int, sent_at: float, answer_s: float
) -> None:
    lease = EtcdLease(1, ttl_s)
    lease.renewed(sent_at, ttl_s)
    assert lease.renew_at == pytest.approx(sent_at + ttl_s / 5)
    assert lease.expires_at == pytest.approx(sent_at + ttl_s)
    assert 2 * lease.interval_s < ttl_s / 2, "a stall is noticed before it can cost a lease renewed at half its time"


def test_etcd_protocol_uses_the_granted_ttl() -> None:
    lease = EtcdLease(1, 1)
    lease.renewed(100.0, 5)
    assert (lease.renew_at, lease.expires_at) == (101.0, 105.0)
