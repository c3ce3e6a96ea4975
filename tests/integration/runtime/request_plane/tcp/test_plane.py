"""The TCP plane's addresses."""

import asyncio
import ipaddress

import msgspec
import pytest

from dynamo.runtime.request_plane.base import Target
from dynamo.runtime.request_plane.tcp.batched_caller import BatchedLink
from dynamo.runtime.request_plane.tcp.common import TcpOptions, advertised, local_address
from dynamo.runtime.request_plane.tcp.plane import TcpPlane
from dynamo.runtime.request_plane.tcp.upstream_caller import UpstreamLink
from dynamo.runtime.server import Dispatcher


def test_tcp_plane_local_address_is_an_address_of_the_machine() -> None:
    ipaddress.ip_address(local_address())


@pytest.mark.parametrize("wildcard", ["", "0.0.0.0", "::"])
def test_tcp_plane_never_advertises_a_wildcard(wildcard: str) -> None:
    assert advertised(wildcard) == local_address()


@pytest.mark.parametrize("host", ["127.0.0.1", "worker-3.cluster.local"])
def test_tcp_plane_advertises_a_configured_host_unchanged(host: str) -> None:
    assert advertised(host) == host


async def test_tcp_plane_bound_to_every_interface_advertises_one() -> None:
    plane = TcpPlane(Dispatcher(), TcpOptions(host="0.0.0.0"))
    await plane.listen()
    assert (plane.address("p").tcp or "").startswith(local_address() + ":")
    await plane.close()


async def test_tcp_plane_close_cancels_response_connections() -> None:
    plane = TcpPlane(Dispatcher(), TcpOptions(host="127.0.0.1"))
    dialling = plane._responses.tasks.start(asyncio.Event().wait(), "request")  # type: ignore[arg-type]
    await plane.close()
    assert dialling.cancelled()
    assert len(plane._responses.tasks) == 0


async def test_tcp_plane_switches_from_upstream_to_batched_framing() -> None:
    """A router queries a source through a record that does not declare batched frames, before any request is sent."""
    worker, caller = (TcpPlane(Dispatcher(), TcpOptions(host="127.0.0.1")) for _ in range(2))
    await worker.listen()
    address, _, path = (worker.address("1/ns/worker/generate").tcp or "").partition("/")
    source = Target(1, address, path, "msgpack", is_batched=False)
    ours = msgspec.structs.replace(source, is_batched=True, has_pulse=True)
    await caller.connect(source)
    await caller.connect(ours)
    kinds = {type(link) for link in caller._links.values()}
    assert kinds == {UpstreamLink, BatchedLink}
    assert isinstance(caller._links[caller._key(ours)], BatchedLink)
    await caller.close()
    await worker.close()
