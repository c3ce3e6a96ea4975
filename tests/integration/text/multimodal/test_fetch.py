"""Media are fetched from allowed hosts, within limits; malicious hosts are refused.

The hosts are servers on loopback, which the tests' own name service finds under any name.
"""

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from dynamo.core.errors import InvalidArgument
from dynamo.text.multimodal import fetch as media_fetch
from dynamo.text.multimodal.fetch import MediaFetcher, fetch
from dynamo.text.multimodal.source import FetchLimits

OPEN = FetchLimits(allows_internal=True, file_bytes_max=100_000, timeout_s=30.0)
PUBLIC = "93.184.216.34"

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A server that returns a given response to every request."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self.answers = list(answers)
        self.received_requests: list[bytes] = []
        self.port = 0
        self.connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            self.received_requests.append(await reader.readuntil(b"\r\n\r\n"))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    def url(self, path: str = "/a", host: str = "media.example", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


@asynccontextmanager
async def hosted(*answers: bytes | Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    host = Host(*answers)
    server = await asyncio.start_server(host.answer, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host


def ok(body: bytes, *headers: str, length: bool = True) -> bytes:
    lines = ["HTTP/1.1 200 OK", "content-type: image/png; x=y", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()


async def refused(url: str, message: str, limits: FetchLimits = OPEN, **more: Any) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await fetch(url, limits, **more)


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"picture"),
        ok(b"picture", length=False),
        ok(b"3\r\npic\r\n4\r\nture\r\n0\r\n\r\n", "transfer-encoding: chunked", length=False),
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + ok(b"picture"),
        ok(gzip.compress(b"picture"), "content-encoding: gzip"),
        ok(zlib.compress(b"picture"), "content-encoding: deflate"),
    ],
)
async def test_media_fetch_reads_from_a_host(answer: bytes) -> None:
    async with hosted(answer) as host:
        media = await fetch(host.url("/a?b"), OPEN, accepts=("image/",), resolve=host.resolve)
        assert (media.data, media.content_type) == (b"picture", "image/png")
        [requested] = host.received_requests
        assert requested.startswith(b"GET /a?b HTTP/1.1\r\n")
        assert f"host: media.example:{host.port}\r\n".encode() in requested


async def test_media_fetch_verifies_the_certificate_of_the_host() -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("media.example").configure_cert(server)
    authority.configure_trust(client)
    async with hosted(ok(b"picture"), tls=server) as host:
        url = host.url(scheme="https")
        assert (await fetch(url, OPEN, resolve=host.resolve, tls=client)).data == b"picture"
        other = host.url(scheme="https", host="other.example")
        await refused(other, "certificate", resolve=host.resolve, tls=client)
        await refused(url, "certificate", resolve=host.resolve)


async def test_media_fetch_never_connects_to_a_private_host() -> None:
    async with hosted(ok(b"secret")) as host:
        for name in ("localhost", "127.0.0.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]"):
            await refused(f"https://{name}:{host.port}/", "not public", FetchLimits())

        async def both(name: str, port: int) -> Sequence[str]:
            return [PUBLIC, "127.0.0.1"]

        await refused(f"https://trap.example:{host.port}/", "not public", FetchLimits(), resolve=both)
        assert host.connections == 0


async def test_media_fetch_connects_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to loopback at the second lookup."""
    looked_up, connected = [], []

    async def rebinding(name: str, port: int) -> Sequence[str]:
        looked_up.append(name)
        return [PUBLIC] if len(looked_up) == 1 else ["127.0.0.1"]

    async def connect(address: str, port: int, **more: Any) -> Any:
        connected.append((address, more["server_hostname"]))
        raise ConnectionRefusedError

    monkeypatch.setattr(media_fetch.asyncio, "open_connection", connect)
    await refused("https://rebinding.example/", "connection failed", FetchLimits(), resolve=rebinding)
    assert (looked_up, connected) == (["rebinding.example"], [(PUBLIC, "rebinding.example")])


async def test_media_fetch_checks_every_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host is public; the target of its redirect is not."""
    addresses = {"public.example": PUBLIC, "inside.example": "10.0.0.1"}
    async with hosted(b"") as host:
        opened = asyncio.open_connection

        async def resolve(name: str, port: int) -> Sequence[str]:
            return [addresses.get(name, name)]

        async def connect(address: str, port: int, **more: Any) -> Any:
            assert address == PUBLIC
            return await opened("127.0.0.1", host.port)

        monkeypatch.setattr(media_fetch.asyncio, "open_connection", connect)
        for where, message in (
            ("https://inside.example/", "not public"),
            ("https://169.254.169.254/latest/", "metadata service"),
            ("https://168.63.129.16/metadata", "metadata service"),
            ("https://[fec0::1]/", "not public"),
            ("https://[fec0::1", "invalid URL"),
            ("http://public.example/", "only https"),
            ("file:///etc/passwd", "scheme"),
            ("data:image/png;base64,AAAA", "scheme"),
            ("//inside.example/x", "not public"),
        ):
            host.answers = [redirect(where)]
            await refused("https://public.example/", message, FetchLimits(), resolve=resolve)
        assert host.connections == 9


async def test_media_fetch_follows_a_bounded_number_of_redirects() -> None:
    async with hosted(redirect("/b"), redirect("c", 308), ok(b"picture")) as host:
        assert (await fetch(host.url("/a/x"), OPEN, resolve=host.resolve)).data == b"picture"
        assert [requested.split()[1] for requested in host.received_requests] == [b"/a/x", b"/b", b"/c"]
        host.answers = [redirect("/again")]
        await refused(host.url(), "more than 3 redirects", resolve=host.resolve)
        assert host.connections == 3 + 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", "status 302"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP"),
        (b"", "connection was closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-len", "connection was closed"),
        (ok(b"pic", "content-length: 99", length=False), "connection was closed"),
        (ok(b"x" * 100_001), "more than 100000 bytes"),
        (ok(b"x" * 100_001, length=False), "more than 100000 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 1\r\n\r\nx", "'text/html'"),
        (ok(gzip.compress(b"\0" * 50_000_000, mtime=0), "content-encoding: gzip"), "more than 100000 bytes"),
        (ok(gzip.compress(b"picture", mtime=0)[:-4], "content-encoding: gzip"), "is truncated"),
        (ok(b"no gzip at all", "content-encoding: gzip"), "cannot be decompressed"),
        (ok(b"x", "content-encoding: br"), "'br'"),
        (ok(b"x", "content-encoding: gzip, gzip"), "unsupported content encoding"),
    ],
)
async def test_media_fetch_reports_an_invalid_response(answer: bytes, message: str) -> None:
    async with hosted(answer) as host:
        await refused(host.url(), message, accepts=("image/",), resolve=host.resolve)


async def test_media_fetch_limits_the_body() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ok(b"", length=False))
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with hosted(endless) as host:
        await refused(host.url(), "more than 100000 bytes", resolve=host.resolve)


async def test_media_fetch_limits_the_headers() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: " + b"y" * 8192 + b"\r\n")
            await writer.drain()

    async with hosted(endless) as host:
        await refused(host.url(), "headers", resolve=host.resolve)


async def test_media_fetch_times_out_on_a_slow_body() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ok(b"x", "content-length: 1000", length=False))
        await reader.read()  # Until the client disconnects.

    async with hosted(slow) as host:
        limits = FetchLimits(allows_internal=True, timeout_s=0.2)
        await refused(host.url(), "did not arrive within 0.2 s", limits, resolve=host.resolve)


async def test_media_fetch_times_out_on_name_resolution() -> None:
    async def silent(name: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    limits = FetchLimits(connect_timeout_s=0.05)
    await refused("https://slow.example/", "took too long", limits, resolve=silent)


async def test_media_fetch_reports_a_host_without_address() -> None:
    async def nothing(name: str, port: int) -> Sequence[str]:
        return []

    await refused("https://gone.example/", "connection failed", FetchLimits(), resolve=nothing)


async def test_media_fetch_reads_data_and_files_without_a_host(tmp_path: Path) -> None:
    assert (await fetch("data:image/png;base64,eHl6", FetchLimits(), accepts=("image/",))).data == b"xyz"
    (tmp_path / "a").write_bytes(b"x" * 10)
    limits = FetchLimits(local_path=str(tmp_path), file_bytes_max=10)
    assert (await fetch(f"file://{tmp_path}/a", limits)).data == b"x" * 10
    await refused(f"file://{tmp_path}/b", "cannot be read", limits)
    await refused(f"file://{tmp_path}/a", "more than 9 bytes", FetchLimits(local_path=str(tmp_path), file_bytes_max=9))


@pytest.mark.parametrize("status", ["200 OK", "206 Partial Content"])
async def test_media_fetch_reads_only_the_head_where_that_is_enough(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\ncontent-type: image/png\r\ncontent-length: 90000\r\n\r\n".encode() + b"x" * 200

    async def stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()

    async with hosted(stalls) as host:
        media = await fetch(host.url(), OPEN, accepts=("image/",), resolve=host.resolve, head_bytes=100)
        assert len(media.data) >= 100
        assert b"\r\nrange: bytes=0-99\r\n" in host.received_requests[0]


async def test_media_fetch_limits_concurrency() -> None:
    now, most, open_gate = [0], [0], asyncio.Event()

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        if now[0] == 2:
            open_gate.set()
        await open_gate.wait()
        now[0] -= 1
        writer.write(ok(b"x"))
        await writer.drain()

    async with hosted(counted) as host:
        fetcher = MediaFetcher(FetchLimits(allows_internal=True, concurrency=2), resolve=host.resolve)
        media = await asyncio.gather(*(fetcher.fetch(host.url()) for _ in range(6)))
        assert [one.data for one in media] == [b"x"] * 6
        assert most[0] == 2


async def test_media_fetch_errors_do_not_reveal_addresses() -> None:
    async def inside(name: str, port: int) -> Sequence[str]:
        return ["10.11.12.13"]

    with pytest.raises(InvalidArgument) as raised:
        await fetch("https://probe.example/", FetchLimits(), resolve=inside)
    assert "10.11" not in str(raised.value)
