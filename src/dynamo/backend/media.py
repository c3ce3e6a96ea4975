"""Media: images, videos and audio clips fetched from URLs for an engine: `{"image": […]}`.

`llm.media_fetch` decides which URLs and sizes are allowed, as elsewhere; an engine only decodes the content.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.text.multimodal.fetch import fetch
from dynamo.text.multimodal.source import Media

KINDS = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""Media fields of a request, and their names in engines."""

Decode = Callable[[str, Media], Awaitable[Any]]


async def media_items(urls: Mapping[str, Sequence[str]], decode: Decode) -> dict[str, list[Any]]:
    """Fetch all media of a prompt concurrently. Raise `InvalidArgument` for media that cannot be fetched."""
    unknown = [kind for kind in urls if kind not in KINDS]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)} parts are not supported by this engine", param="messages")

    async def one(kind: str, url: str) -> Any:
        return await decode(kind, await fetch(url))

    found: dict[str, list[Any]] = {}
    for field, listed in urls.items():
        kind = KINDS[field]
        found[kind] = list(await asyncio.gather(*(one(kind, url) for url in listed)))
    return found
