"""Media: images, videos and sounds from their URLs, as engines take them: `{"image": […]}`.

What may be fetched, and how much, is decided by `llm.media_fetch`, as everywhere; an engine only decodes what came.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.text.multimodal.fetch import fetch
from dynamo.text.multimodal.source import Media

KINDS = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The field of a request, and the engines' word."""

Decode = Callable[[str, Media], Awaitable[Any]]


async def media_items(urls: Mapping[str, Sequence[str]], decode: Decode) -> dict[str, list[Any]]:
    """Everything that a prompt shows, fetched side by side. Raises `InvalidArgument` for what cannot be had."""
    unknown = [kind for kind in urls if kind not in KINDS]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)} parts are not known to this engine", param="messages")

    async def one(kind: str, url: str) -> Any:
        return await decode(kind, await fetch(url))

    found: dict[str, list[Any]] = {}
    for field, listed in urls.items():
        kind = KINDS[field]
        found[kind] = list(await asyncio.gather(*(one(kind, url) for url in listed)))
    return found
