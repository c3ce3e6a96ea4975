"""Worker side of upstream's framing: bytes captured from a released 1.6.1 worker."""

import pytest
from tests.settle import turns
from tests.unit.runtime.request_plane.tcp.upstream_transport import UpstreamTransport

from dynamo.core.codec import json_decode
from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.runtime.request_plane import frame
from dynamo.runtime.request_plane.base import Request
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.runtime.request_plane.tcp.common import TcpLimits, TcpMetrics
from dynamo.runtime.request_plane.tcp.sockets import Sockets
from dynamo.runtime.request_plane.tcp.tls import TcpTls
from dynamo.runtime.request_plane.tcp.upstream_worker import (
    ResponseConnections,
    UpstreamReply,
    UpstreamRequestStream,
    read_request,
    read_stream_address,
)

METRICS = TcpMetrics(MetricsRegistry())
LIMITS = TcpLimits()


def worker_end(codec: str) -> tuple[UpstreamReply, UpstreamTransport]:
    reply = UpstreamReply(
        Request("r", b"", codec),
        "subject-1",
        LIMITS,
        METRICS,
        ResponseConnections(Sockets(TcpTls(), LIMITS, METRICS), lambda: None),
    )
    transport = UpstreamTransport()
    reply.connection_made(transport)  # type: ignore[arg-type]
    return reply, transport


async def test_upstream_worker_opens_the_response_connection_with_handshake_and_prologue() -> None:
    _, transport = worker_end("msgpack")
    assert transport.take() == [
        (b'{"subject":"subject-1","stream_type":"response"}', b""),
        (b'{"error":null}', b""),
    ]


# Bodies as a released worker sent them.
ITEM = b"\x82\xa4data\x81\xa4data\x82\xa9token_ids\x91\x00\xa5index\x00\xaecomplete_final\xc2"
FINAL = b"\x81\xaecomplete_final\xc3"


async def test_upstream_worker_writes_a_token_as_released_dynamo() -> None:
    reply, transport = worker_end("msgpack")
    transport.take()
    reply.token(0)
    await turns()
    reply.finish()
    await turns()
    assert transport.take() == [(b"", ITEM), (b"", FINAL), (b'"sentinel"', b"")]
    reply.connection_lost(None)


async def test_upstream_worker_writes_a_json_response_as_released_dynamo() -> None:
    reply, transport = worker_end("json")
    transport.take()
    reply.token(0)
    reply.item({"token_ids": [1, 2], "index": 0})
    reply.finish()
    await turns()
    assert transport.take() == [
        (b"", b'{"data":{"data":{"token_ids":[0],"index":0}},"complete_final":false}'),
        (b"", b'{"data":{"data":{"token_ids":[1,2],"index":0}},"complete_final":false}'),
        (b"", b'{"complete_final":true}'),
        (b'"sentinel"', b""),
    ]


async def test_upstream_worker_sends_an_error_item_before_the_end() -> None:
    reply, transport = worker_end("json")
    transport.take()
    reply.fail(InvalidArgument("bad thing"))
    await turns()
    error, final, sentinel = transport.take()
    assert json_decode(error[1])["data"]["event"] == "error"
    assert json_decode(error[1])["data"]["error"]["error_type"] == {"Backend": "InvalidArgument"}
    assert (final[1], sentinel[0]) == (b'{"complete_final":true}', b'"sentinel"')


async def test_upstream_worker_merges_tokens_of_one_tick() -> None:
    reply, transport = worker_end("msgpack")
    transport.take()
    for token in range(40):
        reply.token(token)
    await turns()
    assert len(transport.take()) == 3


@pytest.mark.parametrize(("control", "killed"), [(b'"stop"', False), (b'"kill"', True)])
async def test_upstream_worker_handles_stop_and_kill(control: bytes, killed: bool) -> None:
    reply, transport = worker_end("msgpack")
    reply.data_received(frame.two_part(control, b""))
    assert (reply.is_cancelled, reply.is_killed, transport.is_closed) == (True, killed, killed)


@pytest.mark.parametrize(
    "header",
    [b"", b"{}", b'{"id":"r","request_type":"s","response_type":"m","connection_info":{"transport":"t","info":"{"}}'],
)
def test_upstream_worker_refuses_an_unreadable_request_header(header: bytes) -> None:
    with pytest.raises(InvalidArgument):
        read_request(frame.UpstreamRequest("p", b"{}", frame.two_part(header, b"")))


STREAMED = (
    b'{"id":"r","request_type":"many_in","response_type":"many_out","payload_codec":"msgpack",'
    b'"connection_info":{"transport":"tcp_server","info":"{\\"address\\":\\"a:1\\",\\"subject\\":\\"one\\"}"},'
    b'"request_stream_connection_info":{"transport":"tcp_server",'
    b'"info":"{\\"address\\":\\"a:2\\",\\"subject\\":\\"two\\",\\"stream_type\\":\\"request\\"}"}}'
)


def test_upstream_worker_reads_the_address_of_request_frames() -> None:
    address = read_stream_address(frame.two_part(STREAMED, b""))
    assert address is not None
    assert (address.address, address.subject) == ("a:2", "two")
    assert read_stream_address(frame.two_part(b'{"id":"r"}', b"\x80")) is None
    with pytest.raises(InvalidArgument, match="request stream"):
        read_stream_address(frame.two_part(STREAMED.replace(b'\\"a:2\\"', b"2"), b""))


async def test_upstream_worker_reads_request_frames_on_their_own_connection_until_the_end() -> None:
    frames, transport = RequestFrames(), UpstreamTransport()
    stream = UpstreamRequestStream(frames, "two", LIMITS, METRICS)
    stream.connection_made(transport)  # type: ignore[arg-type]
    assert transport.take() == [(b'{"subject":"two","stream_type":"request"}', b"")]
    stream.data_received(frame.two_part(b"", b"\x01") + frame.two_part(b"", b"\x02"))
    stream.data_received(frame.two_part(b'"stop"', b""))
    assert [one async for one in frames] == [b"\x01", b"\x02"]
    frames.close()
    assert transport.is_closed


async def test_upstream_worker_fails_a_request_with_a_broken_frame_stream(caplog: pytest.LogCaptureFixture) -> None:
    frames, transport = RequestFrames(), UpstreamTransport()
    stream = UpstreamRequestStream(frames, "two", LIMITS, METRICS)
    stream.connection_made(transport)  # type: ignore[arg-type]
    stream.data_received(b"\xff" * 64)
    assert transport.is_closed
    assert "malformed request stream" in caplog.text
    stream.connection_lost(None)
    assert [one async for one in frames] == []
