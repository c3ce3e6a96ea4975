"""Requests and responses of `/v1/images/generations`, `/v1/images/edits`, `/v1/audio/speech` and `/v1/videos`.

Fields that are not declared here are engine-specific: they are sent as `extra_args.media_passthrough`, where upstream's
workers read them.
"""

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.strict import INVALID, MALFORMED, fail, refuse

PASSTHROUGH = "media_passthrough"
SPEED_MIN, SPEED_MAX = 0.25, 4.0
DIGITS_MAX = 10  # In a number that is sent as text.

R = TypeVar("R", "ImageRequest", "SpeechRequest", "VideoRequest")


class ImageRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of `/v1/images/generations` and, with an input image, of `/v1/images/edits`."""

    prompt: str
    model: str | None = None
    n: int | None = None
    quality: str | None = None
    response_format: str | None = None
    stream: bool | None = None
    size: str | None = None
    background: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    partial_images: int | None = None
    moderation: str | None = None
    style: str | None = None
    user: str | None = None
    input_reference: str | None = None
    """An input image, as a URL; `data:` URLs too."""
    nvext: dict[str, Any] | None = None
    extra_args: dict[str, Any] | UnsetType = UNSET


class SpeechRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of `/v1/audio/speech`."""

    input: str
    model: str | None = None
    voice: str | dict[str, Any] | None = None
    data_source: Literal["url", "b64_json"] | None = None
    response_format: str | None = None
    speed: float | None = None
    task_type: str | None = None
    language: str | None = None
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    max_new_tokens: int | None = None
    user: str | None = None
    stream_format: Literal["audio", "sse"] | UnsetType = UNSET
    """Format of the response stream; not used by the worker."""
    nvext: dict[str, Any] | None = None
    extra_args: dict[str, Any] | UnsetType = UNSET


class VideoRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The body of `/v1/videos` and `/v1/videos/stream`."""

    prompt: str
    model: str | None = None
    input_reference: str | None = None
    seconds: int | None = None
    size: str | None = None
    user: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    stream: bool | None = None
    nvext: dict[str, Any] | None = None
    extra_args: dict[str, Any] | UnsetType = UNSET


class Image(msgspec.Struct, kw_only=True):
    """One image of a response: by URL, or in base64."""

    url: str | UnsetType = UNSET
    b64_json: str | UnsetType = UNSET
    revised_prompt: str | None = None


class Images(msgspec.Struct, kw_only=True):
    """A worker's output for an image request, and the response to the client."""

    created: int
    data: list[Image] = msgspec.field(default_factory=list)
    background: str | None = None
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    usage: dict[str, Any] | None = None


class Clip(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One audio or video clip, or a piece of one: by URL, or in base64."""

    output_format: str
    url: str | None = None
    b64_json: str | None = None
    fps: int | None = None
    audio_sample_rate: int | None = None


class Clips(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A worker's output for a speech or video request."""

    id: str
    object: str | UnsetType = UNSET
    model: str
    status: str = msgspec.field(default_factory=lambda: "completed")
    progress: int = msgspec.field(default_factory=lambda: 100)
    created: int
    data: list[Clip] = msgspec.field(default_factory=lambda: [])  # noqa: PIE807 - `list` would be omitted when empty
    error: str | None = None
    inference_time_s: float | None = None


def read_media(given: Any, kind: type[R]) -> R:
    """Return the typed request of a decoded body. Raise `InvalidArgument`."""
    if not isinstance(given, dict):
        raise InvalidArgument(f"{MALFORMED}expected an object")
    known: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in given.items():
        (known if name in kind.__struct_fields__ and name != "extra_args" else others)[name] = value
    seconds = known.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < DIGITS_MAX:
        known["seconds"] = int(seconds)  # OpenAI's client sends it as text.
    try:
        request = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        fail(str(error), "")
    if others:
        request.extra_args = {PASSTHROUGH: others}
    if isinstance(request, SpeechRequest):
        if request.speed is not None and not SPEED_MIN <= request.speed <= SPEED_MAX:
            raise InvalidArgument(f"{INVALID}speed: speed must be between {SPEED_MIN} and {SPEED_MAX}", param="speed")
    elif isinstance(request, ImageRequest) and request.stream:
        refuse("stream")
    return request
