"""MmRouting: block hashes that include the images, videos and sounds of a prompt.

To an engine an image is a run of equal placeholder tokens, so two prompts with different images would have equal
blocks. Each block is therefore hashed together with the hashes of its media. Upstream's form, by block:

    [{"mm_objects": [{"mm_hash": 1234, "offsets": [[0, 16]]}]}, None, …]

A frontend that can compute the number of tokens of an image expands the prompt as the engine does, with each
placeholder replaced by a token that is specific to the image (`ImageRouting`); an engine's events are translated into
the same tokens (`kv_events.publisher`).
"""

import asyncio
import base64
import binascii
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import xxhash
from msgspec import UNSET

from dynamo.core.errors import ConfigError, DynamoException, InvalidArgument
from dynamo.model_card.card import ModelFiles, read_json
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.text.multimodal.fetch import fetch
from dynamo.text.multimodal.image_size import HEAD_BYTES, Size, size_of
from dynamo.text.multimodal.image_tokens import ImageTokens, rule_of
from dynamo.text.multimodal.source import is_data
from dynamo.tokens.hashing import U64, block_hashes, mixed_block_hashes, seed_of

logger = logging.getLogger(__name__)

IMAGES = "image_url"
PAD_FIRST, PAD_MASK = 1_000_000, (1 << 30) - 1
"""Range of the tokens that represent images: above any vocabulary."""
MORE_HEAD_BYTES = 256 << 10  # Of an inline image whose first bytes do not contain its size.
HEAD_TIMEOUT_S = 2.0  # For the first bytes of a remote image; a longer wait costs more than image-aware routing saves.
SIZES_MAX = 4096
BLANK = 0  # Fills the last block, as upstream; no engine's block is equal to it.


def hash_of_url(url: str) -> int:
    """Return the hash that identifies an image: upstream hashes its URL, also for inline images."""
    return xxhash.xxh3_64_intdigest(url.encode())


def pad_of(mm_hash: int) -> int:
    """Return the token that represents an image in the routing view of a prompt."""
    return PAD_FIRST + (mm_hash & PAD_MASK)


FetchHead = Callable[[str], Awaitable[bytes]]
"""Reader of the first bytes of a remote image. Raises a `DynamoException`."""


async def fetch_head(url: str) -> bytes:
    """Read from the network, or from the allowed local directory."""
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        return (await fetch(url, accepts=("image/",), head_bytes=HEAD_BYTES)).data


class ImageRouting:
    """Add the images of a model's prompts, and their positions, to the routing information."""

    def __init__(self, rule: ImageTokens, get_head: FetchHead = fetch_head) -> None:
        self._rule = rule
        self._get_head = get_head
        self._sizes: OrderedDict[int, Size] = OrderedDict()

    async def add(self, request: PreprocessedRequest, block_size: int) -> None:
        """Add `mm_routing_info` if the sizes of all media are known; otherwise routing compares text only."""
        shown = request.multi_modal_data
        if shown is UNSET or shown.keys() != {IMAGES} or request.mm_processor_kwargs is not UNSET:
            return
        urls = [one.get("Url", "") for one in shown[IMAGES]]
        hashes = [hash_of_url(url) for url in urls]
        if request.token_ids.count(self._rule.token_id) != len(urls):
            logger.warning("the prompt's images do not match its placeholders; routing compares text only")
            return
        try:
            sizes = await asyncio.gather(*map(self._size, hashes, urls))
        except (DynamoException, TimeoutError, OSError) as error:
            logger.warning("unknown image size; routing compares text only: %s", error or "timed out")
            return
        counts = [self._rule.count(size) for size in sizes]
        tokens: list[int] = []
        images = zip(hashes, counts, strict=True)
        for token in request.token_ids:
            if token != self._rule.token_id:
                tokens.append(token)
                continue
            mm_hash, count = next(images)
            tokens += [pad_of(mm_hash)] * (count or 1)  # An image that the model does not accept stays one token.
        whole = len(tokens)
        tokens += [BLANK] * (-whole % block_size)
        request.mm_routing_info = {"routing_token_ids": tokens, "block_mm_infos": [], "expanded_prompt_len": whole}
        extra = request.extra_args if isinstance(request.extra_args, dict) else {}
        request.extra_args = {**extra, "mm_hashes": [f"{one:016x}" for one in hashes]}

    async def _size(self, mm_hash: int, url: str) -> Size:
        size = self._sizes.get(mm_hash)
        if size is None:
            size = _size_in(url) if is_data(url) else size_of(await self._get_head(url))
            if size is None:
                raise InvalidArgument("not an image, or its size is not within its first bytes")
            if len(self._sizes) >= SIZES_MAX:
                self._sizes.popitem(last=False)
        self._sizes[mm_hash] = size
        self._sizes.move_to_end(mm_hash)
        return size


def _size_in(url: str) -> Size | None:
    head, _, text = url.partition(",")
    if not head.lower().endswith(";base64"):
        return None
    for count in (HEAD_BYTES, MORE_HEAD_BYTES):
        try:
            size = size_of(base64.b64decode(text[: count // 3 * 4]))
        except binascii.Error:
            return None
        if size is not None:
            return size
    return None


def image_routing(files: ModelFiles, source_path: str | None, name: str) -> ImageRouting | None:
    """Return the image routing of a model; None, with a warning, if the tokens of its images cannot be counted."""
    folders = [os.path.dirname(files.config), *([source_path] if source_path else [])]
    try:
        return ImageRouting(rule_of(read_json(files.config), folders))
    except ConfigError as error:
        logger.warning("KV routing of model %s compares text only, not images: %s", name, error)
        return None


def media_of(block_mm_infos: Sequence[Any] | None) -> list[list[int]]:
    """Return by block the hashes of its media; empty if no block has media. Raise `InvalidArgument`."""
    if block_mm_infos is None or not any(info is not None for info in block_mm_infos):
        return []
    return [[] if info is None else _hashes_of(info) for info in block_mm_infos]


def hashes_of(
    tokens: Sequence[int],
    block_size: int,
    *,
    block_mm_infos: Sequence[Any] | None = None,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
) -> list[int]:
    """Return the hash of each complete block, including its media and salts. Raise `InvalidArgument`."""
    if block_size < 1:
        raise InvalidArgument(f"kv_block_size cannot be {block_size}: expected 1 or more", param="kv_block_size")
    media, seed = media_of(block_mm_infos), seed_of(lora_name, cache_salt)
    try:
        if not media and not is_eagle:
            return block_hashes(tokens, block_size, seed)
        return mixed_block_hashes(tokens, block_size, seed, media, is_eagle=is_eagle)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"token_ids: expected numbers from 0 to 2^32 - 1: {error}", param="token_ids") from None


def tokens_of(request: PreprocessedRequest) -> list[int]:
    """Return the prompt as a multimodal engine stores it, with as many tokens per image as the frontend counted."""
    info = request.mm_routing_info
    if not isinstance(info, dict):
        return request.token_ids
    tokens, length = info.get("routing_token_ids"), info.get("expanded_prompt_len")
    if not isinstance(tokens, list) or not tokens:
        return request.token_ids
    return tokens[:length] if isinstance(length, int) else tokens


def padded(
    tokens: Sequence[int], block_size: int, block_mm_infos: Sequence[Any], placeholders: Collection[int]
) -> tuple[list[int], list[Any]]:
    """Translate an engine's blocks into routing tokens: each image's placeholders become the token of that image.

    The first run of placeholders in a block is its first image, and so on; extra runs belong to the last image. The
    second result is the images of blocks without placeholders. Raise `InvalidArgument`.
    """
    made, left = list(tokens), list(block_mm_infos)
    for number, info in enumerate(block_mm_infos):
        images = [] if info is None else _hashes_of(info)
        first = number * block_size
        run, before = -1, None
        for place in range(first, min(first + block_size, len(made))) if images else ():
            token = tokens[place]
            if token in placeholders:
                run += token != before
                made[place] = pad_of(images[min(run, len(images) - 1)])
            before = token
        if run >= 0:
            left[number] = None
    return made, left


def _hashes_of(info: Any) -> list[int]:
    shown = info.get("mm_objects") if isinstance(info, Mapping) else None
    if not isinstance(shown, Sequence) or isinstance(shown, str):
        raise InvalidArgument(f"block_mm_infos: {info!r}: expected mm_objects", param="block_mm_infos")
    found = []
    for one in shown:
        if not isinstance(one, Mapping) or "mm_hash" not in one or "offsets" not in one:
            raise InvalidArgument(
                f"block_mm_infos: {one!r}: expected an object with mm_hash and offsets", param="block_mm_infos"
            )
        mm_hash = one["mm_hash"]
        if not isinstance(mm_hash, int) or isinstance(mm_hash, bool) or not 0 <= mm_hash <= U64:
            raise InvalidArgument(
                f"block_mm_infos: mm_hash {mm_hash!r}: expected a number from 0 to 2^64 - 1", param="block_mm_infos"
            )
        found.append(mm_hash)
    return found
