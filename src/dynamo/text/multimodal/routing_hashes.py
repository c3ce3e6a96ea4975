"""MmRouting: what the images, videos and sounds of a prompt mean for its blocks (serving-plane.md §4.6).

To an engine a picture is a row of equal placeholder tokens, so two prompts with different pictures would have equal
blocks. Each block is therefore hashed with the hashes of what it shows. Upstream's form, by block:

    [{"mm_objects": [{"mm_hash": 1234, "offsets": [[0, 16]]}]}, None, …]

A frontend that knows how many tokens an image becomes writes the prompt as the engine will have it instead, each
placeholder replaced by a token that stands for that very image (`ImageRouting`); an engine's events are told in the
same tokens (`llm.kv_event_publisher`).
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
"""The tokens that stand for images: above any vocabulary."""
MORE_HEAD_BYTES = 256 << 10  # Of an image in the request itself, where its first bytes do not tell its size.
HEAD_TIMEOUT_S = 2.0  # For the first bytes of an image elsewhere; who waits longer for them is better off without.
SIZES_MAX = 4096
BLANK = 0  # Fills the last block, as upstream; no engine's block is equal to it.


def hash_of_url(url: str) -> int:
    """What an image is known by: upstream hashes its URL, also where that holds the image itself."""
    return xxhash.xxh3_64_intdigest(url.encode())


def pad_of(mm_hash: int) -> int:
    """The token that stands for an image in a router's view of a prompt."""
    return PAD_FIRST + (mm_hash & PAD_MASK)


FetchHead = Callable[[str], Awaitable[bytes]]
"""The first bytes of an image elsewhere. Raises a `DynamoException`."""


async def fetch_head(url: str) -> bytes:
    """Over the network, or from the directory that may be read."""
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        return (await fetch(url, accepts=("image/",), head_bytes=HEAD_BYTES)).data


class ImageRouting:
    """Tells the router of a model's prompts which images they show, and where."""

    def __init__(self, rule: ImageTokens, get_head: FetchHead = fetch_head) -> None:
        self._rule = rule
        self._get_head = get_head
        self._sizes: OrderedDict[int, Size] = OrderedDict()

    async def add(self, request: PreprocessedRequest, block_size: int) -> None:
        """Adds `mm_routing_info`, where all that a prompt shows is known; otherwise text alone is compared."""
        shown = request.multi_modal_data
        if shown is UNSET or shown.keys() != {IMAGES} or request.mm_processor_kwargs is not UNSET:
            return
        urls = [one.get("Url", "") for one in shown[IMAGES]]
        hashes = [hash_of_url(url) for url in urls]
        if request.token_ids.count(self._rule.token_id) != len(urls):
            logger.warning("a prompt's images are not its placeholders: it is routed by its text")
            return
        try:
            sizes = await asyncio.gather(*map(self._size, hashes, urls))
        except (DynamoException, TimeoutError, OSError) as error:
            logger.warning("the size of an image is unknown, its prompt is routed by its text: %s", error or "too late")
            return
        counts = [self._rule.count(size) for size in sizes]
        tokens: list[int] = []
        images = zip(hashes, counts, strict=True)
        for token in request.token_ids:
            if token != self._rule.token_id:
                tokens.append(token)
                continue
            mm_hash, count = next(images)
            tokens += [pad_of(mm_hash)] * (count or 1)  # One that the model will not take stays as it is.
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
                raise InvalidArgument("it is no image, or does not say it in its first bytes")
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
    """That of a model with these files; None, with a warning, for one whose images nobody here can count."""
    folders = [os.path.dirname(files.config), *([source_path] if source_path else [])]
    try:
        return ImageRouting(rule_of(read_json(files.config), folders))
    except ConfigError as error:
        logger.warning("KV routing of model %s compares text only, not images: %s", name, error)
        return None


def media_of(block_mm_infos: Sequence[Any] | None) -> list[list[int]]:
    """By block, the hashes of what it shows; empty where no block shows anything. Raises `InvalidArgument`."""
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
    """The hash of each complete block, however it is made up. Raises `InvalidArgument`."""
    if block_size < 1:
        raise InvalidArgument(f"kv_block_size {block_size}: expected 1 or more", param="kv_block_size")
    media, seed = media_of(block_mm_infos), seed_of(lora_name, cache_salt)
    try:
        if not media and not is_eagle:
            return block_hashes(tokens, block_size, seed)
        return mixed_block_hashes(tokens, block_size, seed, media, is_eagle=is_eagle)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"token_ids: expected numbers from 0 to 2^32 - 1: {error}", param="token_ids") from None


def tokens_of(request: PreprocessedRequest) -> list[int]:
    """The prompt as an engine has it that shows images: with as many tokens for each as the frontend counted."""
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
    """An engine's blocks in the tokens of routers: the placeholders of each image become the token that stands for it.

    A block's first run of placeholders is its first image, and so on; what is more than there are images belongs to the
    last. The second result is the images of those blocks that have no placeholder. Raises `InvalidArgument`.
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
