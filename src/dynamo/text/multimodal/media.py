"""Media: images, videos and sounds of a conversation, passed to the worker by their URLs.

Nothing is fetched here. Inline data is sent as a `data:` URL, within its limits.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatMessage, ContentPart, InputAudio, MediaUrl
from dynamo.protocols.openai_ranges import MEDIA_PARTS
from dynamo.text.multimodal.source import FetchLimits, check_base64, check_data_url, environment_limits, is_data

SCHEMES = ("http://", "https://", "file://")
"""URL schemes for workers to fetch; each worker decides which hosts it allows."""
ACCEPTS = {"image_url": ("image/",), "video_url": ("video/",), "audio_url": ("audio/",)}


def media_of(messages: Sequence[ChatMessage], limits: FetchLimits | None = None) -> dict[str, list[dict[str, str]]]:
    """Return all media in conversation order, by kind; empty if there are none.

    Raise `InvalidArgument` that names the part whose media cannot be fetched or read.
    """
    limits = limits or environment_limits()
    found: dict[str, list[dict[str, str]]] = {}
    for turn, message in enumerate(messages):
        if isinstance(message.content, list):
            for place, part in enumerate(message.content):
                spot = f"messages[{turn}].content[{place}].{part.type}"
                if part.type in MEDIA_PARTS:
                    url = getattr(part, part.type).url
                    check_part(url, part.type, f"{spot}.url", limits)
                    found.setdefault(part.type, []).append({"Url": url})
                elif part.input_audio is not None:
                    check_sound(part.input_audio, f"{spot}.data", limits)
                    found.setdefault("audio_url", []).append({"Url": data_url(part.input_audio)})
    return found


def check_part(url: str, kind: str, spot: str, limits: FetchLimits) -> None:
    """Raise `InvalidArgument` for a URL that is not valid for media; `spot` is its path in the request."""
    if is_data(url):
        try:
            check_data_url(url, limits, ACCEPTS[kind])
        except InvalidArgument as error:
            raise InvalidArgument(f"{spot}: {error}", param=spot) from None
    elif not url.lower().startswith(SCHEMES):
        raise InvalidArgument(f"{spot}: expected a URL that begins with {', '.join(SCHEMES)} or data:", param=spot)


def check_sound(audio: InputAudio, spot: str, limits: FetchLimits) -> None:
    """Raise `InvalidArgument` for a sound that is too long or not base64; `spot` is its path in the request."""
    try:
        if len(audio.data) > limits.data_url_bytes_max:
            reason = f"{len(audio.data)} bytes: expected at most {limits.data_url_bytes_max}"
            raise InvalidArgument(f"{reason} (DYN_MM_MAX_DATA_URL_MB)")  # noqa: TRY301 - the handler adds the path
        check_base64(audio.data)
    except InvalidArgument as error:
        raise InvalidArgument(f"{spot}: {error}", param=spot) from None


def has_media(messages: Sequence[ChatMessage]) -> bool:
    """Return whether there are any media; cheaper than `media_of`."""
    return any(
        part.type in MEDIA_PARTS or part.type == "input_audio"
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def data_url(audio: InputAudio) -> str:
    """Return the `data:` URL of a sound in the request."""
    return f"data:audio/{audio.format};base64,{audio.data}"


def shown_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the conversation that the worker receives in addition to the tokens, with `data:` URLs emptied."""
    return [
        {key: value for key, value in msgspec.to_builtins(_without_data(message)).items() if value is not None}
        for message in messages
    ]


def _without_data(message: ChatMessage) -> ChatMessage:
    if not isinstance(message.content, list):
        return message
    return msgspec.structs.replace(message, content=[_emptied(part) for part in message.content])


def _emptied(part: ContentPart) -> ContentPart:
    if part.input_audio is not None:
        return msgspec.structs.replace(part, input_audio=InputAudio("", part.input_audio.format))
    if part.type in MEDIA_PARTS:
        media: MediaUrl = getattr(part, part.type)
        if is_data(media.url):
            return msgspec.structs.replace(part, **{part.type: msgspec.structs.replace(media, url="")})
    return part
