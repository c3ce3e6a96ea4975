"""Routes of images, speech and videos: requests that workers with those outputs serve."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dynamo.core.codec import json_decode, msgpack_encode
from dynamo.core.errors import InvalidArgument
from dynamo.http.routes.table import ENGINE_REFUSALS, Operation, RouteContext, RouteTable
from dynamo.http.server.multipart import FormPart, is_multipart, read_multipart
from dynamo.protocols.media import (
    Clips,
    ImageRequest,
    Images,
    R,
    SpeechRequest,
    VideoRequest,
    read_media,
)
from dynamo.protocols.strict import MALFORMED, UNREADABLE, fail_to_read
from dynamo.serving.bodies import decoded
from dynamo.serving.endpoints import Surface, relayed
from dynamo.serving.media_forms import FramesForm, ImagesForm, SpeechForm, VideoEventsForm, VideosForm
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.response_form import Form
from dynamo.serving.response_stream import ResponseStream
from dynamo.serving.text_models import text_model
from dynamo.text.multimodal.source import environment_limits

IMAGES = relayed("images", "Images")
AUDIOS = relayed("audios", "Audios")
VIDEOS = relayed("videos", "Videos")

THREAD_BYTES_MIN = 1 << 20  # Decoding a longer body takes milliseconds and would block the event loop.
NUMBERS = frozenset({"n", "seconds", "output_compression", "partial_images"})
"""Form fields that are numbers; a form carries them as text."""
PIECES = frozenset({None, "wav", "pcm"})
"""Audio formats that can be streamed; audio whose speed is changed is completed first."""
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    pages = MediaPages(context.pipeline, context.models)
    for path, handler, operation, variable in (
        (
            "/v1/images/generations",
            pages.images,
            Operation("Create images from a text", ImageRequest, Images),
            "IMAGES",
        ),
        ("/v1/images/edits", pages.edits, Operation("Edit an image by a text", ImageRequest, Images), "EDITS"),
        (
            "/v1/audio/speech",
            pages.speech,
            Operation("Create speech from a text", SpeechRequest, BINARY, streams=True, answer_media="audio/wav"),
            "AUDIO_SPEECH",
        ),
        (
            "/v1/videos",
            pages.videos,
            Operation("Create a video from a text", VideoRequest, Clips, streams=True),
            "VIDEOS",
        ),
        (
            "/v1/videos/stream",
            pages.frames,
            Operation("Stream the frames of a video", VideoRequest, BINARY, answer_media="multipart/x-mixed-replace"),
            "VIDEOS_STREAM",
        ),
    ):
        described = replace(operation, refusals=ENGINE_REFUSALS)
        routes.hot("POST", path, handler, described, variable=f"DYN_HTTP_SVC_{variable}_PATH")


class MediaPages(Struct, frozen=True):
    """Handlers of these routes."""

    pipeline: Pipeline
    models: Models

    def images(self, exchange: ResponseStream) -> None:
        """POST /v1/images/generations."""
        self.pipeline.start(exchange, IMAGES, self._images(exchange))

    def edits(self, exchange: ResponseStream) -> None:
        """POST /v1/images/edits."""
        self.pipeline.start(exchange, IMAGES, self._edits(exchange))

    def speech(self, exchange: ResponseStream) -> None:
        """POST /v1/audio/speech."""
        self.pipeline.start(exchange, AUDIOS, self._speech(exchange))

    def videos(self, exchange: ResponseStream) -> None:
        """POST /v1/videos."""
        self.pipeline.start(exchange, VIDEOS, self._videos(exchange))

    def frames(self, exchange: ResponseStream) -> None:
        """POST /v1/videos/stream."""
        self.pipeline.start(exchange, VIDEOS, self._frames(exchange))

    async def _images(self, exchange: ResponseStream) -> None:
        request = await read(exchange, ImageRequest)
        await self._relay(exchange, IMAGES, request, ImagesForm())

    async def _edits(self, exchange: ResponseStream) -> None:
        request = await read(exchange, ImageRequest)
        if not request.input_reference:
            raise InvalidArgument("input_reference is required for /v1/images/edits", param="input_reference")
        await self._relay(exchange, IMAGES, request, ImagesForm())

    async def _speech(self, exchange: ResponseStream) -> None:
        request = await read(exchange, SpeechRequest)
        as_events = request.stream_format == "sse"
        request.stream_format = msgspec.UNSET
        in_pieces = request.data_source != "url" and request.response_format in PIECES and request.speed in (None, 1.0)
        if in_pieces:
            request.nvext = {**(request.nvext or {}), "frontend_accepts_audio_chunks": True}
        await self._relay(exchange, AUDIOS, request, SpeechForm(as_events=as_events), stream=in_pieces)

    async def _videos(self, exchange: ResponseStream) -> None:
        request = await read(exchange, VideoRequest)
        stream = bool(request.stream)
        await self._relay(exchange, VIDEOS, request, VideoEventsForm() if stream else VideosForm(), stream=stream)

    async def _frames(self, exchange: ResponseStream) -> None:
        request = await read(exchange, VideoRequest)
        await self._relay(exchange, VIDEOS, request, FramesForm(), stream=True)

    async def _relay(
        self,
        exchange: ResponseStream,
        surface: Surface,
        request: ImageRequest | SpeechRequest | VideoRequest,
        form: Form,
        *,
        stream: bool = False,
    ) -> None:
        model = text_model(self.models, request.model, surface.model_type, exchange.account)
        await self.pipeline.relay(exchange, surface.endpoint, model, partial(_packed, request), form, stream=stream)


async def read(exchange: ResponseStream, kind: type[R]) -> R:
    """Return the request, decoded from JSON or a form; a long one in a thread. Raise `InvalidArgument`."""
    body, media = exchange.body, exchange.header(b"content-type")
    if media is None or not is_multipart(media):
        return await decoded(body, partial(read_json, kind=kind), "media")
    if len(body) < THREAD_BYTES_MIN:
        return read_form(body, media, kind)
    return await asyncio.to_thread(read_form, body, media, kind)


def read_form(body: bytes | bytearray, media: bytes, kind: type[R]) -> R:
    """Return the request, decoded from a form of that media type. Raise `InvalidArgument`."""
    return read_media(from_form(read_multipart(body, media, environment_limits().data_url_bytes_max)), kind)


def read_json(body: bytes | bytearray, kind: type[R]) -> R:
    """Return the request, decoded from JSON. Raise `InvalidArgument`."""
    try:
        given = json_decode(body)
    except UNREADABLE as error:
        fail_to_read(error, "")
    return read_media(given, kind)


def from_form(parts: Sequence[FormPart]) -> dict[str, Any]:
    """Return the fields of a form as in a JSON request: files as `data:` URLs, the first image as `input_reference`.

    Further images and a mask become fields of the engine. Raise `InvalidArgument`.
    """
    fields: dict[str, Any] = {}
    images: list[str] = []
    for part in parts:
        name = part.name.removesuffix("[]")
        if name in ("image", "input_reference"):
            images.append(part.text if part.filename is None else part.data_url)
        elif part.filename is not None:
            fields[name] = part.data_url
        else:
            fields[name] = _value(name, part)
    if images:
        fields["input_reference"] = images[0]
    if len(images) > 1:
        fields["images"] = images
    return fields


def _value(name: str, part: FormPart) -> Any:
    text = part.text
    if name in NUMBERS and text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    if name == "stream" and text in ("true", "false"):
        return text == "true"
    if name == "nvext":
        try:
            return json_decode(part.data)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"{MALFORMED}nvext: {error}", param="nvext") from None
    return text


def _packed(payload: object, _request_id: str) -> bytes:
    return msgpack_encode(payload)
