"""Block hashes of prompts with images."""

import base64
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from dynamo.core.errors import InvalidArgument
from dynamo.model_card.card import ModelFiles
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.text.multimodal.image_tokens import ImageTokens
from dynamo.text.multimodal.routing_hashes import (
    ImageRouting,
    hash_of_url,
    hashes_of,
    image_routing,
    media_of,
    pad_of,
    padded,
)

TOKENS = list(range(1, 14))


def shown(*hashes: int) -> dict[str, Any]:
    return {"mm_objects": [{"mm_hash": one, "offsets": [[0, 4]]} for one in hashes]}


def test_routing_hash_changes_with_the_image_of_a_block() -> None:
    plain = hashes_of(TOKENS, 4)
    with_image = hashes_of(TOKENS, 4, block_mm_infos=[None, shown(5)])
    assert len(plain) == len(with_image) == 3
    assert with_image[0] == plain[0] and with_image[2] == plain[2]
    assert with_image[1] != plain[1]


def test_routing_hash_depends_on_the_number_but_not_the_order_of_images() -> None:
    both = hashes_of(TOKENS, 4, block_mm_infos=[shown(5, 7)])
    assert both == hashes_of(TOKENS, 4, block_mm_infos=[shown(7, 5)])
    assert both != hashes_of(TOKENS, 4, block_mm_infos=[shown(5)])
    assert hashes_of(TOKENS, 4, block_mm_infos=[shown(5)]) != hashes_of(TOKENS, 4, block_mm_infos=[shown(5, 5)])


def test_routing_hashes_equal_the_released_ones() -> None:
    """Observed of ai-dynamo 1.6.1."""
    assert hashes_of(TOKENS, 4, is_eagle=True) == [1914873892905420881, 1929047464662796003, 8175084615354468756]
    assert hashes_of(TOKENS, 4, block_mm_infos=[shown(7, 5)])[0] == 6213349302030360111
    assert hashes_of(
        TOKENS, 4, block_mm_infos=[shown(5)], lora_name="x", cache_salt="n", is_eagle=True
    ) == [12552169394050473350, 5939057069875308312, 18023383422306086102]  # fmt: skip


def test_routing_hash_with_lookahead_requires_a_following_token() -> None:
    assert len(hashes_of(TOKENS[:12], 4, is_eagle=True)) == 2
    assert hashes_of(TOKENS[:4], 4, is_eagle=True) == []


def test_routing_hash_ignores_empty_block_infos() -> None:
    assert media_of([None, None]) == []
    assert hashes_of(TOKENS, 4, block_mm_infos=[None] * 9) == hashes_of(TOKENS, 4)
    assert hashes_of(TOKENS, 4, block_mm_infos=[{"mm_objects": []}]) == hashes_of(TOKENS, 4)


@pytest.mark.parametrize(
    "info",
    [{}, {"mm_objects": "x"}, {"mm_objects": [{}]}, {"mm_objects": [{"mm_hash": 5}]}, shown(-1), shown(1 << 64), 7],
)
def test_routing_hash_error_names_an_unreadable_info(info: Any) -> None:
    with pytest.raises(InvalidArgument, match="block_mm_infos"):
        hashes_of(TOKENS, 4, block_mm_infos=[info])


def test_routing_hash_refuses_tokens_and_block_sizes_out_of_range() -> None:
    with pytest.raises(InvalidArgument, match="kv_block_size"):
        hashes_of(TOKENS, 0)
    with pytest.raises(InvalidArgument, match="token_ids"):
        hashes_of([1 << 32], 1)


# ---- images that the frontend sees ----------------------------------------------------------------------------------

OTHER = "https://example.com/a.png"


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)


def url(width: int, height: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(width, height)).decode()


class Host:
    """Where images are that a request only names."""

    def __init__(self, *heads: bytes | Exception) -> None:
        self.heads = list(heads)
        self.received_requests: list[str] = []

    async def __call__(self, where: str) -> bytes:
        self.received_requests.append(where)
        head = self.heads.pop(0)
        if isinstance(head, Exception):
            raise head
        return head


def routing(host: Host | None = None) -> ImageRouting:
    """Return routing for a model whose images become as many tokens as they are wide; none taller than 99."""
    rule = ImageTokens(9, lambda size: size[0] if size[1] < 100 else None)
    return ImageRouting(rule, host or Host())


def prompt(tokens: list[int], *urls: str, **more: Any) -> PreprocessedRequest:
    shown = {"image_url": [{"Url": one} for one in urls]}
    return PreprocessedRequest("m", tokens, multi_modal_data=shown, **more)


async def test_routing_tokens_replace_each_placeholder_by_its_image_tokens() -> None:
    request = prompt([1, 9, 2, 9, 3], url(2, 1), url(3, 1), extra_args={"messages": []})
    await routing().add(request, 4)
    first, second = hash_of_url(url(2, 1)), hash_of_url(url(3, 1))
    a, b = pad_of(first), pad_of(second)
    assert request.mm_routing_info == {
        "routing_token_ids": [1, a, a, 2, b, b, b, 3],
        "block_mm_infos": [],
        "expanded_prompt_len": 8,
    }
    assert request.extra_args == {"messages": [], "mm_hashes": [f"{first:016x}", f"{second:016x}"]}
    assert request.token_ids == [1, 9, 2, 9, 3], "what the engine is told is as it was"


async def test_routing_tokens_keep_one_token_for_an_unsupported_image() -> None:
    """As the released frontend has it; the worker will refuse it."""
    request = prompt([1, 9, 2, 3], url(2, 100))
    await routing().add(request, 4)
    assert isinstance(request.mm_routing_info, dict)
    assert request.mm_routing_info["routing_token_ids"] == [1, pad_of(hash_of_url(url(2, 100))), 2, 3]


async def test_routing_tokens_pad_the_last_block() -> None:
    request = prompt([1, 9], url(2, 1))
    await routing().add(request, 4)
    assert isinstance(request.mm_routing_info, dict)
    assert request.mm_routing_info["routing_token_ids"][-1] == 0
    assert request.mm_routing_info["expanded_prompt_len"] == 3


async def test_routing_tokens_read_a_remote_image_once() -> None:
    host = Host(png(2, 1))
    images = routing(host)
    for _ in range(3):
        request = prompt([9], OTHER)
        await images.add(request, 4)
        assert isinstance(request.mm_routing_info, dict)
    assert host.received_requests == [OTHER]


@pytest.mark.parametrize(
    ("request_of", "heads"),
    [
        (lambda: PreprocessedRequest("m", [9]), ()),
        (lambda: prompt([9, 9], url(2, 1)), ()),
        (lambda: prompt([9], "data:image/png;base64,aGVsbG8="), ()),
        (lambda: prompt([9], "data:image/png;base64,a"), ()),
        (lambda: prompt([9], "data:image/png,hello"), ()),
        (lambda: prompt([9], url(2, 1), mm_processor_kwargs={"max_pixels": 9}), ()),
        (lambda: prompt([9], OTHER), (TimeoutError(),)),
        (lambda: prompt([9], OTHER), (InvalidArgument("no"),)),
        (lambda: prompt([9], OTHER), (b"hello",)),
    ],
)
async def test_routing_tokens_omit_images_of_unknown_size(request_of: Any, heads: tuple[Any, ...]) -> None:
    request = request_of()
    await routing(Host(*heads)).add(request, 4)
    assert request.mm_routing_info is UNSET
    assert request.extra_args is UNSET


async def test_routing_info_is_unset_for_images_with_a_video() -> None:
    request = prompt([9], url(2, 1))
    assert isinstance(request.multi_modal_data, dict)
    request.multi_modal_data["video_url"] = [{"Url": "https://example.com/v.mp4"}]
    await routing().add(request, 4)
    assert request.mm_routing_info is UNSET


def test_routing_tokens_warn_about_a_model_without_image_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 9}')
    files = ModelFiles(str(tmp_path / "config.json"), "")
    assert image_routing(files, None, "m") is None
    assert "compares text only" in caplog.text
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14, "merge_size": 2}')
    assert image_routing(files, None, "m") is not None


@pytest.mark.parametrize(
    ("tokens", "infos", "made", "left"),
    [
        ([1, 9, 9, 9, 9, 2, 9, 9], [[5], [5, 7]], "1AAAA2BB", [None, None]),
        ([9, 9, 9, 9, 9, 2, 9, 2], [[5, 7], [5, 7, 5]], "AAAAA2B2", [None, None]),
        ([9, 2, 9, 2, 9, 2, 9, 2], [[5], [5, 7]], "A2A2A2B2", [None, None]),
        ([9, 2, 9, 2, 9, 2, 9, 2], [None, [7]], "9292B2B2", [None, None]),
        ([5, 6, 7, 8, 1, 2, 3, 4], [[5], None], "56781234", [[5], None]),
    ],
)
def test_routing_tokens_expand_placeholders_block_by_block(
    tokens: list[int], infos: list[list[int] | None], made: str, left: list[list[int] | None]
) -> None:
    """Observed of ai-dynamo 1.6.1."""
    names = {pad_of(5): "A", pad_of(7): "B"}
    reported = [None if one is None else shown(*one) for one in infos]
    found, rest = padded(tokens, 4, reported, {9})
    assert "".join(names.get(token, str(token)) for token in found) == made
    assert rest == [None if one is None else shown(*one) for one in left]
