"""ImageLoader: images from URLs, files and frontends, with a cache; an image is fetched once for concurrent requests."""

import asyncio
import base64
import binascii
import functools
import logging
from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from dynamo.common.http import HttpConnectionError, HttpStatusError, HttpTimeoutError, fetch_bytes
from dynamo.common.http.media_reference import max_media_bytes
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy, validate_media_url
from dynamo.common.multimodal.media_source import read_local_media_bytes
from dynamo.common.multimodal.shared_image_cache import SharedImageCache, SharedImageCacheStats
from dynamo.common.utils.media_nixl import create_nixl_connector as _create_nixl_connector
from dynamo.common.utils.media_nixl import read_decoded_media_via_nixl
from dynamo.core.config import read_bool, setting

logger = logging.getLogger(__name__)

URL_VARIANT_KEY = "Url"
DECODED_VARIANT_KEY = "Decoded"
UUID_ONLY_VARIANT_KEY = "UuidOnly"
IMAGE_CACHE_SCOPE_KEY = "image_cache_scope"
IMAGE_CACHE_SESSION_SCOPED_ENV = "DYN_MM_IMAGE_CACHE_SESSION_SCOPED"

Image = Any
"""`PIL.Image.Image`; Pillow is imported with the first image."""


class InvalidImage(Exception):
    """Content that is no image, with the HTTP status for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def image_cache_scope_from_request(request: Mapping[str, Any]) -> str | None:
    """Return the session whose images a request may share; None without one."""
    scope = request.get(IMAGE_CACHE_SCOPE_KEY)
    return (scope.strip() or None) if isinstance(scope, str) else None


def image_cache_session_scoped_from_env() -> bool:
    """Return whether sessions share no images."""
    return setting(IMAGE_CACHE_SESSION_SCOPED_ENV, False, read_bool)


def scope_image_cache_key(cache_key: str, cache_scope: str | None, *, session_scoped_cache: bool) -> str | None:
    """Return the key of an image within a session; None if sessions share no images and none is given."""
    if not session_scoped_cache:
        return cache_key
    return None if cache_scope is None else f"{len(cache_scope)}:{cache_scope}:{cache_key}"


class ImageLoader:
    """Loader with an in-memory LRU cache of `cache_size` images, and the shared cache of the environment."""

    CACHE_SIZE_MAXIMUM = setting("DYN_MM_IMAGE_CACHE_SIZE", 8, int)

    def __init__(
        self,
        cache_size: int = CACHE_SIZE_MAXIMUM,
        http_timeout: float = 30.0,
        enable_frontend_decoding: bool = False,
        url_policy: UrlValidationPolicy | None = None,
        max_bytes: int | None = None,
        session_scoped_cache: bool | None = None,
    ) -> None:
        self._shared = SharedImageCache.from_env()
        self._nixl_connector = _create_nixl_connector() if enable_frontend_decoding else None
        if session_scoped_cache is None:
            session_scoped_cache = image_cache_session_scoped_from_env()
        self._session_scoped, self._cache_size = session_scoped_cache, cache_size
        self._timeout_s, self._given_max_bytes = http_timeout, max_bytes
        self._policy = url_policy if url_policy is not None else UrlValidationPolicy.from_env()
        self._inflight: dict[str, asyncio.Task[Image]] = {}
        self._image_cache: OrderedDict[str, Image] = OrderedDict()

    @property
    def cache_entries(self) -> int:
        """Number of images in memory."""
        return len(self._image_cache)

    @property
    def session_scoped_cache(self) -> bool:
        """Whether sessions share no images."""
        return self._session_scoped

    @property
    def shared_image_cache_stats(self) -> SharedImageCacheStats | None:
        """Durations of the shared cache; None without one."""
        return None if self._shared is None else self._shared.stats

    async def load_image(self, image_url: str, *, cache_scope: str | None = None) -> Image:
        """Return an RGB image. Raise `UrlValidationError`, `HttpStatusError`, or `ValueError` for an invalid data URL."""
        url = await validate_media_url(image_url, self._policy)
        key = self._cache_key(url, cache_scope)
        if key is None:
            return await self._fetch_and_process(None, url)
        if key in self._image_cache:
            self._image_cache.move_to_end(key)
            return self._image_cache[key]
        task = self._inflight.get(key)
        if task is None:
            task = self._inflight[key] = asyncio.create_task(self._fetch_and_process(key, url))
            task.add_done_callback(functools.partial(self._on_fetched, key))
        return await asyncio.shield(task)  # The fetch outlives a cancelled request: others may wait for it.

    async def load_image_batch(
        self,
        image_mm_items: list[dict[str, Any]],
        *,
        preserve_uuid_slots: bool = False,
        cache_scope: str | None = None,
    ) -> list[Any]:
        """Return the images of a request, with None in the place of an image that the engine has in its cache.

        An error of the client, of whichever image, has precedence over others.
        """
        for item in image_mm_items:
            if UUID_ONLY_VARIANT_KEY in item and not preserve_uuid_slots:
                raise ValueError("an image with a UUID alone requires an engine that sets preserve_uuid_slots=True")
            if DECODED_VARIANT_KEY in item and self._nixl_connector is None:
                raise ValueError("a decoded image cannot be received with enable_frontend_decoding=False")
        loading = (self._load_item(item, cache_scope) for item in image_mm_items)
        found = await asyncio.gather(*loading, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for kinds in ((asyncio.CancelledError,), (UrlValidationError, HttpStatusError)):
            for error in errors:
                if isinstance(error, kinds):
                    raise error
        if errors:
            kind = ValueError if isinstance(errors[0], ValueError) else RuntimeError
            raise kind("; ".join(f"Failed to decoding image: {error}" for error in errors)) from errors[0]
        return found

    async def _load_item(self, item: dict[str, Any], cache_scope: str | None) -> Image | None:
        if URL_VARIANT_KEY in item:
            return await self.load_image(item[URL_VARIANT_KEY], cache_scope=cache_scope)
        if DECODED_VARIANT_KEY in item:
            return await self._read_and_convert_nixl_image(item[DECODED_VARIANT_KEY])
        if UUID_ONLY_VARIANT_KEY in item:
            return None
        raise ValueError(f"image item has the keys {sorted(item)}: expected Url, Decoded or UuidOnly")

    async def _read_and_convert_nixl_image(self, metadata: dict[str, Any]) -> Image:
        """Return an image that a frontend decoded."""
        from PIL import Image as Pillow

        pixels = await read_decoded_media_via_nixl(self._nixl_connector, metadata)
        is_gray = pixels.ndim == 3 and pixels.shape[2] == 1
        return Pillow.fromarray(pixels[:, :, 0] if is_gray else pixels).convert("RGB")

    def _max_bytes(self) -> int:
        return max_media_bytes() if self._given_max_bytes is None else self._given_max_bytes

    def _cache_key(self, normalized_url: str, cache_scope: str | None = None) -> str | None:
        """Return the key of a remote image; None for content that is not cached."""
        parts = urlsplit(normalized_url)
        if parts.scheme not in ("http", "https"):
            return None
        # Host names have no case; credentials and the zone of an IPv6 address have.
        login, at, place = parts.netloc.rpartition("@")
        host, percent, zone = place.partition("%")
        netloc = f"{login}{at}{host.lower()}{percent}{zone}"
        key = urlunsplit(parts._replace(netloc=netloc, fragment=""))
        return scope_image_cache_key(key, cache_scope, session_scoped_cache=self._session_scoped)

    def _on_fetched(self, key: str, task: "asyncio.Task[Image]") -> None:
        """Keep a fetched image; a failure is raised to the requests that wait for it."""
        self._inflight.pop(key, None)
        if not task.cancelled() and task.exception() is None:
            self._cache_put(key, task.result())

    def _cache_put(self, key: str, image: Image) -> None:
        """Keep an image as the most recently used; above the limit, the least recently used ones are dropped."""
        self._image_cache.pop(key, None)
        self._image_cache[key] = image
        for _ in range(len(self._image_cache) - max(0, self._cache_size)):
            self._image_cache.popitem(last=False)

    async def _fetch_and_process(self, key: str | None, image_url: str) -> Image:
        """Return an image from the shared cache, else from its source."""
        cached = await self._from_shared(key)
        if cached is not None:
            return cached
        content = await self._content(image_url)
        try:
            image = await self._open_image(BytesIO(content))
        except InvalidImage as error:
            raise HttpStatusError(error.status, str(error), image_url) from error
        if self._shared is not None and key is not None:
            await self._shared.put(key, content)
        return image

    async def _from_shared(self, key: str | None) -> Image | None:
        """Return an image of the shared cache; an invalid one is removed."""
        if self._shared is None or key is None:
            return None
        content = await self._shared.get(key)
        if content is None:
            return None
        try:
            return await self._open_image(BytesIO(content))
        except InvalidImage as error:
            logger.warning("removed an invalid image from the shared cache: %s", error)
            await self._shared.delete(key)
            return None

    async def _content(self, url: str) -> bytes:
        """Return the encoded image. Raise `HttpStatusError` with a status of the client for a source that does not respond."""
        if url.startswith("data:"):
            return _decoded(url)
        if url.startswith("file:"):
            return await read_local_media_bytes(url, self._policy)
        try:
            return await fetch_bytes(url, self._timeout_s, policy=self._policy, max_bytes=self._max_bytes())
        except HttpTimeoutError as error:
            raise HttpStatusError(408, f"Timeout loading image: {error}", url) from error
        except HttpConnectionError as error:
            raise HttpStatusError(400, f"Connection error loading image: {error}", url) from error

    @classmethod
    async def _open_image(cls, image_data: BytesIO) -> Image:
        return await asyncio.to_thread(cls._open_image_sync, image_data)

    @staticmethod
    def _open_image_sync(image_data: BytesIO) -> Image:
        """Return an RGB image. Raise `InvalidImage`."""
        try:
            from PIL import Image as Pillow
            from PIL import UnidentifiedImageError
        except ImportError:
            raise ImportError("images require Pillow: pip install pillow") from None
        try:
            with Pillow.open(image_data) as image:
                return image.convert("RGB")
        except UnidentifiedImageError as error:
            raise InvalidImage(415, "the content is not an image of a supported format") from error
        except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
            raise InvalidImage(400, f"Invalid or truncated image data: {error}") from error


def _decoded(url: str) -> bytes:
    """Return the content of a data URL. Raise `ValueError`."""
    head, _, payload = url.partition(",")
    kind, *parameters = head.removeprefix("data:").split(";")
    if not kind.startswith("image/"):
        raise ValueError(f"Data URL must be an image type, not {kind[:80] or 'without type'}")
    if "base64" not in parameters:
        raise ValueError("Data URL: expected base64 content")
    try:
        return base64.b64decode(unquote(payload), validate=True)
    except binascii.Error as error:
        raise ValueError(f"Invalid base64 in a data URL: {error}") from error
