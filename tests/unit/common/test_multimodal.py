"""Media references, and caches of encoder outputs."""

import asyncio
from io import BytesIO

import pytest

from dynamo.common.http import HttpStatusError, HttpTimeoutError
from dynamo.common.http.url_validator import UrlValidationError, UrlValidationPolicy, validate_media_url
from dynamo.common.memory.multimodal_embedding_cache_manager import CachedEmbedding, MultimodalEmbeddingCacheManager
from dynamo.common.multimodal import image_loader
from dynamo.common.multimodal.async_encoder_cache import AsyncEncoderCache
from dynamo.common.multimodal.image_loader import ImageLoader, InvalidImage
from dynamo.common.multimodal.media_source import decode_data_uri
from dynamo.common.multimodal.shared_image_cache import SharedImageCache
from dynamo.common.multimodal.shared_image_cache import _RateLimitedErrorWarnings as RateLimitedErrorWarnings


class Tensor:
    def __init__(self, size: int) -> None:
        self.size = size

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 1

    def numel(self) -> int:
        return self.size


@pytest.mark.parametrize(
    "url", ["", "http://example.com", "https://127.0.0.1/x", "https://localhost/x", "ftp://a/b", "file:///etc/passwd"]
)
async def test_reference_that_is_not_permitted_is_refused(url: str) -> None:
    with pytest.raises(UrlValidationError):
        await validate_media_url(url, UrlValidationPolicy())


def test_data_url_is_decoded_up_to_its_limit() -> None:
    assert decode_data_uri("data:image/png;base64,AAEC", 3) == b"\x00\x01\x02"
    with pytest.raises(UrlValidationError, match="exceeds"):
        decode_data_uri("data:image/png;base64,AAEC", 2)


async def test_concurrent_requests_share_one_computation() -> None:
    cache, calls = AsyncEncoderCache(MultimodalEmbeddingCacheManager(10)), []

    async def encode() -> CachedEmbedding:
        calls.append(1)
        return CachedEmbedding(Tensor(4))

    await asyncio.gather(*(cache.get_or_compute("a", encode) for _ in range(3)))
    assert (len(calls), cache.stats["entries"], cache.stats["in_flight"]) == (1, 1, 0)


def test_least_recently_used_embedding_is_evicted_first() -> None:
    cache = MultimodalEmbeddingCacheManager(10)
    for key in "ab":
        cache.set(key, CachedEmbedding(Tensor(4)))
    cache.get("a")
    assert cache.set_with_delta("c", CachedEmbedding(Tensor(4))) == (True, ["c"], ["b"])
    assert not cache.set("d", CachedEmbedding(Tensor(11)))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> ImageLoader:
    """A loader whose images are their content; `bad` is none."""

    async def open_image(content: BytesIO) -> bytes:
        if content.getvalue() == b"bad":
            raise InvalidImage(415, "no image")
        return content.getvalue()

    made = ImageLoader(2, url_policy=UrlValidationPolicy(allow_http=True, allow_private_ips=True))
    monkeypatch.setattr(made, "_open_image", open_image)
    return made


class Site:
    """Content by URL, and the URLs that were fetched."""

    def __init__(self, content: dict[str, bytes | Exception]) -> None:
        self.content = content
        self.fetched: list[str] = []

    async def fetch(self, url: str, *_: object, **__: object) -> bytes:
        self.fetched.append(url)
        found = self.content[url]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(
        {"http://a/1": b"1", "http://A/1": b"1", "http://a/2": b"2", "http://a/3": b"3", "http://a/bad": b"bad"}
    )
    made.content["http://a/slow"] = HttpTimeoutError("slow")
    monkeypatch.setattr(image_loader, "fetch_bytes", made.fetch)
    return made


async def test_image_is_fetched_once_for_equal_urls_until_it_is_evicted(loader: ImageLoader, site: Site) -> None:
    await asyncio.gather(*(loader.load_image("http://a/1") for _ in range(2)))
    await loader.load_image("http://A/1#part")
    assert site.fetched == ["http://a/1"]
    await loader.load_image("http://a/2")
    await loader.load_image("http://a/1")
    await loader.load_image("http://a/3")
    assert await loader.load_image("http://a/2") == b"2"
    assert site.fetched == ["http://a/1", "http://a/2", "http://a/3", "http://a/2"]


async def test_session_scoped_cache_shares_no_images_between_sessions(site: Site, loader: ImageLoader) -> None:
    loader._session_scoped = True
    for scope in ("x", "x", "y", None, None):
        await loader.load_image("http://a/1", cache_scope=scope)
    assert len(site.fetched) == 4


@pytest.mark.parametrize(("url", "status"), [("http://a/bad", 415), ("http://a/slow", 408)])
async def test_failed_image_has_the_status_of_its_cause(loader: ImageLoader, site: Site, url: str, status: int) -> None:
    items = [{"Url": "data:image/png;base64,AAEC"}, {"Url": "data:image/png,x"}, {"Url": url}]
    with pytest.raises(HttpStatusError) as failure:
        await loader.load_image_batch(items)
    assert failure.value.status == status


async def test_image_batch_keeps_slots_without_data_only_when_requested(loader: ImageLoader, site: Site) -> None:
    items = [{"Url": "http://a/1"}, {"UuidOnly": "u"}]
    assert await loader.load_image_batch(items, preserve_uuid_slots=True) == [b"1", None]
    for item in (items[1], {"Decoded": {}}):
        with pytest.raises(ValueError, match=r"preserve_uuid_slots|enable_frontend_decoding"):
            await loader.load_image_batch([item])


class Cluster:
    """A Redis cluster in memory."""

    def __init__(self, error: Exception | None = None) -> None:
        self.content: dict[str, bytes] = {}
        self.error = error

    async def get(self, key: str) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.content.get(key)

    async def set(self, key: str, content: bytes, ex: int) -> None:
        self.content[key] = content

    async def delete(self, key: str) -> None:
        del self.content[key]


async def test_shared_cache_is_read_before_the_source_and_filled_from_it(loader: ImageLoader, site: Site) -> None:
    shared = loader._shared = SharedImageCache(Cluster(), 60)
    await loader.load_image("http://a/1")
    await shared.put("http://a/2", b"cached")
    await shared.put("http://a/3", b"bad")
    assert await loader.load_image("http://a/2") == b"cached"
    assert await loader.load_image("http://a/3") == b"3"
    assert site.fetched == ["http://a/1", "http://a/3"]
    assert ("get", "hit", "le_64kib") in shared.stats.snapshot_and_drain()
    assert shared.stats.snapshot_and_drain() == {}


async def test_lost_cluster_fails_no_request_and_warns_once_per_interval(loader: ImageLoader, site: Site) -> None:
    loader._shared = SharedImageCache(Cluster(TimeoutError()), 60)
    assert await loader.load_image("http://a/1") == b"1"
    warnings = RateLimitedErrorWarnings(60.0)
    assert [warnings.record(time) for time in (0.0, 1.0, 60.0)] == [1, None, 2]
