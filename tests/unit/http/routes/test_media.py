"""The routes of images, speech and videos, with workers in the same process."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.relays import Handler, RelayCluster, open_relays
from tests.scripted_engine.stack import DEADLINE_S, Wire
from tests.settle import until

from dynamo.http.routes.media import add, read_form
from dynamo.model_card.types import ModelType
from dynamo.protocols.media import ImageRequest

IMAGES, EDITS, SPEECH, VIDEOS, FRAMES = (
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/videos",
    "/v1/videos/stream",
)
PNG = b"\x89PNG\r\n\x1a\nrest"
PNG_URL = "data:image/png;base64," + b64encode(PNG).decode()
IMAGE = {"created": 1, "data": [{"b64_json": "AAAA"}]}
FORM = {"content-type": "multipart/form-data; boundary=XX"}


def clip(*pieces: bytes, kind: str = "wav", **more: Any) -> dict[str, Any]:
    data = [{"output_format": kind, "b64_json": b64encode(piece).decode()} for piece in pieces]
    return {"id": "i", "object": "o", "model": "m", "status": "completed", "created": 1, "data": data, **more}


def link(**more: Any) -> dict[str, Any]:
    return clip(data=[{"output_format": "mp4", "url": "http://v"}], **more)


def says(*items: Any) -> Handler:
    async def handler(request: Any) -> AsyncIterator[Any]:
        for one in items:
            if isinstance(one, Exception):
                raise one
            yield one

    return handler


def form(*parts: tuple[str, str | None, bytes]) -> bytes:
    body = b""
    for name, filename, value in parts:
        body += b'--XX\r\nContent-Disposition: form-data; name="%b"' % name.encode()
        if filename is not None:
            body += b'; filename="%b"\r\nContent-Type: image/png' % filename.encode()
        body += b"\r\n\r\n" + value + b"\r\n"
    return body + b"--XX--\r\n"


async def test_image_request_forwards_unknown_fields_to_the_worker() -> None:
    async with open_relays(add) as relays:
        await relays.serve(
            "i", ModelType.Images, says(IMAGE, {"created": 2, "data": [{"url": "http://a"}], "size": "1x1"})
        )
        fields = {"prompt": "cat", "n": 2, "size": "1x1", "nvext": {"seed": 3}, "guardrails": False}
        answer = await relays.send_request(IMAGES, {"model": "i", **fields})
        assert answer.json["data"] == [
            {"b64_json": "AAAA", "revised_prompt": None},
            {"url": "http://a", "revised_prompt": None},
        ]
        assert (answer.json["created"], answer.json["size"], answer.json["usage"]) == (2, "1x1", None)
        (wait_requested,) = relays.received_requests
        assert wait_requested.pop("extra_args") == {"media_passthrough": {"guardrails": False}}
        assert wait_requested == {"model": "i", "prompt": "cat", "n": 2, "size": "1x1", "nvext": {"seed": 3}}


async def test_image_edit_accepts_multipart_or_json() -> None:
    async with open_relays(add) as relays:
        await relays.serve("i", ModelType.Images, says(IMAGE))
        text: list[tuple[str, str | None, bytes]] = [
            ("model", None, b"i"),
            ("prompt", None, "kätzchen".encode()),
            ("n", None, b"2"),
        ]
        one = await relays.send_request(EDITS, form(*text, ("image", "a.png", PNG)), FORM)
        two = await relays.send_request(
            EDITS, form(*text, ("image[]", "a.png", PNG), ("image[]", "b.png", b"x"), ("mask", "m", b"m")), FORM
        )
        plain = await relays.send_request(EDITS, {"model": "i", "prompt": "cat", "input_reference": PNG_URL})
        assert [one.status, two.status, plain.status] == [200, 200, 200]
        first, second, third = relays.received_requests
        assert first == {"model": "i", "prompt": "kätzchen", "n": 2, "input_reference": PNG_URL}
        others = second["extra_args"]["media_passthrough"]
        assert others["images"] == [PNG_URL, "data:image/png;base64," + b64encode(b"x").decode()]
        assert others["mask"].startswith("data:image/png;base64,")
        assert third["input_reference"] == second["input_reference"] == PNG_URL
        assert (await relays.send_request(EDITS, form(*text), FORM)).json["error"]["param"] == "input_reference"


def test_multipart_form_is_decoded_like_json() -> None:
    body = form(
        ("prompt", None, b"cat"), ("stream", None, b"false"), ("nvext", None, b'{"seed":3}'), ("extra", None, b"x")
    )
    request = read_form(body, FORM["content-type"].encode(), ImageRequest)
    assert (request.stream, request.nvext, request.extra_args) == (
        False,
        {"seed": 3},
        {"media_passthrough": {"extra": "x"}},
    )


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (IMAGES, {"prompt": None}, 400, "prompt"),
        (IMAGES, {"prompt": "x", "n": "two"}, 400, "n"),
        (IMAGES, {"prompt": "x", "stream": True}, 400, "stream"),
        (IMAGES, {"prompt": "x", "model": None}, 404, "model"),
        (IMAGES, {"prompt": "x", "model": "no-such-model"}, 404, "model"),
        (EDITS, {"prompt": "x"}, 400, "input_reference"),
        (SPEECH, {"input": "hi", "speed": 9}, 400, "speed"),
        (SPEECH, {"input": "hi", "data_source": "disk"}, 400, "data_source"),
        (SPEECH, {}, 400, "input"),
        (VIDEOS, {"prompt": "x", "seconds": "soon"}, 400, "seconds"),
        (VIDEOS, {"prompt": "x"}, 404, "model"),
    ],
)
async def test_invalid_media_field_is_refused_by_name(path: str, fields: Any, status: int, param: str) -> None:
    async with open_relays(add) as relays:
        await relays.serve("i", ModelType.Images, says(IMAGE))
        answer = await relays.send_request(path, {"model": "i", **fields})
        assert (answer.status, answer.json["error"]["param"]) == (status, param)
        assert not relays.received_requests


@pytest.mark.parametrize(
    ("body", "media"), [(b"{", None), (b"[]", None), (b"[" * 100_000, None), (b"x", FORM["content-type"])]
)
async def test_malformed_media_body_is_refused(body: bytes, media: str | None) -> None:
    async with open_relays(add) as relays:
        answer = await relays.send_request(IMAGES, body, None if media is None else {"content-type": media})
        assert answer.status == 400


async def test_speech_is_streamed_as_bytes() -> None:
    async with open_relays(add) as relays:
        go_on = asyncio.Event()

        async def speak(request: Any) -> AsyncIterator[Any]:
            yield clip(b"RIFF")
            await go_on.wait()
            yield clip(b"more", b"!")

        await relays.serve("a", ModelType.Audios, speak)
        _, wire = relays.begin(SPEECH, {"model": "a", "input": "hi", "voice": "v"})
        await wait_written(wire, b"RIFF")
        go_on.set()
        async with asyncio.timeout(DEADLINE_S):
            await wire.complete.wait()
        assert b"content-type: audio/wav\r\n" in wire.data
        assert b"more!" in wire.data
        assert relays.received_requests == [
            {"model": "a", "input": "hi", "voice": "v", "nvext": {"frontend_accepts_audio_chunks": True}}
        ]
        rendered = relays.registry.render()
        assert 'endpoint="audios",error_type="",model="a",request_type="stream",status="success"' in rendered


async def test_speech_is_streamed_as_events_when_requested() -> None:
    async with open_relays(add) as relays:
        await relays.serve("a", ModelType.Audios, says(clip(b"RIFF"), clip(b"more")))
        answer = await relays.send_request(SPEECH, {"model": "a", "input": "hi", "stream_format": "sse"})
        events = [json.loads(one.removeprefix("data: ")) for one in answer.text_events]
        assert [one["type"] for one in events] == ["speech.audio.delta", "speech.audio.delta", "speech.audio.done"]
        assert "stream_format" not in relays.received_requests[0]


async def test_speech_stored_remotely_is_returned_as_a_url() -> None:
    async with open_relays(add) as relays:
        await relays.serve("a", ModelType.Audios, says(link()))
        answer = await relays.send_request(
            SPEECH, {"model": "a", "input": "hi", "data_source": "url", "response_format": "mp3"}
        )
        assert answer.json["data"] == [{"output_format": "mp4", "url": "http://v"}]
        assert "nvext" not in relays.received_requests[0]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ((), 500),
        ((clip(),), 500),
        ((clip(status="failed", error="no such voice"),), 400),
        (({"a": 1},), 500),
        ((clip(data=[{"output_format": "wav"}]),), 500),
        ((clip(b"x", kind="wav\r\nset-cookie: x"),), 500),
        ((clip(b""), link()), 200),
    ],
)
async def test_failed_speech_returns_its_status(message: tuple[Any, ...], status: int) -> None:
    async with open_relays(add) as relays:
        await relays.serve("a", ModelType.Audios, says(*message))
        answer = await relays.send_request(SPEECH, {"model": "a", "input": "hi"})
        assert answer.status == status
        if status == 400:
            assert (answer.json["status"], answer.json["error"]) == ("failed", "no such voice")


async def test_interrupted_byte_stream_ends_without_the_last_chunk() -> None:
    async with open_relays(add) as relays:
        await relays.serve("a", ModelType.Audios, says(clip(b"RIFF"), RuntimeError("secret")))
        exchange, wire = relays.begin(SPEECH, {"model": "a", "input": "hi"})
        aborted = asyncio.Event()
        wire.abort = aborted.set  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE_S):
            await aborted.wait()
        assert not exchange.response_complete
        assert not wire.data.endswith(b"0\r\n\r\n")


async def test_video_is_returned_whole_or_streamed_with_progress() -> None:
    async with open_relays(add) as relays:
        await relays.serve("v", ModelType.Videos, says(link(progress=50), link()))
        whole = await relays.send_request(VIDEOS, {"model": "v", "prompt": "cat", "seconds": "4"})
        assert [one["url"] for one in whole.json["data"]] == ["http://v"] * 2
        steps = await relays.send_request(VIDEOS, {"model": "v", "prompt": "cat", "stream": True})
        assert [one["progress"] for one in steps.events] == [50, 100]
        assert [one.get("seconds") for one in relays.received_requests] == [4, None]


async def test_video_frames_are_streamed_as_multipart() -> None:
    async with open_relays(add) as relays:
        await relays.serve("v", ModelType.Videos, says(clip(b"one", kind="jpeg"), clip(b"two!", kind="jpeg")))
        answer = await relays.send_request(FRAMES, {"model": "v", "prompt": "cat"})
        assert answer.headers["content-type"] == "multipart/x-mixed-replace; boundary=frame"
        head = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: "
        assert answer.body == head + b"3\r\n\r\none\r\n" + head + b"4\r\n\r\ntwo!\r\n"


async def test_video_stream_without_a_frame_is_an_error() -> None:
    async with open_relays(add) as relays:
        await relays.serve("v", ModelType.Videos, says(link()))
        assert (await relays.send_request(FRAMES, {"model": "v", "prompt": "cat"})).status == 500


async def test_media_client_disconnect_stops_the_worker() -> None:
    async with open_relays(add) as relays:
        waits = asyncio.Event()

        async def speak(request: Any) -> AsyncIterator[Any]:
            yield clip(b"RIFF")
            await waits.wait()
            yield clip(b"more")
            yield clip(b"last")

        await relays.serve("a", ModelType.Audios, speak)
        exchange, wire = relays.begin(SPEECH, {"model": "a", "input": "hi"})
        await wait_written(wire, b"RIFF")
        exchange.left()
        waits.set()
        async with asyncio.timeout(DEADLINE_S):
            await relays.ended.wait()
        assert relays.pipeline.inflight == 0
        assert 'error_type="cancelled"' in relays.registry.render()


async def wait_written(wire: Wire, piece: bytes) -> None:
    """Returns when the client has that piece."""
    async with asyncio.timeout(DEADLINE_S):
        while piece not in wire.data:
            wire.written.clear()
            await wire.written.wait()


async def test_silent_media_worker_times_out_with_504() -> None:
    async with open_relays(add) as relays:
        await relays.serve("v", ModelType.Videos, silent)
        _, wire = relays.begin(VIDEOS, {"model": "v", "prompt": "cat"})
        await wait_requested(relays)
        relays.pipeline.abandon(0.0)
        async with asyncio.timeout(DEADLINE_S):
            await wire.complete.wait()
        assert wire.data.startswith(b"HTTP/1.1 504 ")


async def silent(request: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield request


async def wait_requested(relays: RelayCluster) -> None:
    """Returns when a worker has the request."""
    await until(lambda: relays.received_requests)
