"""Tracking hashes: only processes with the key compute the same ones."""

import struct
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.kv_router.tracking import KEYED, PUBLIC, TrackingKey, check_tracking, read_key

KEY = TrackingKey("2026-01", b"\x5a" * 32)
TOKENS = list(range(12))


def unpacked(sequence: bytes) -> list[int]:
    return list(struct.unpack(f">{len(sequence) // 8}Q", sequence))


def test_tracking_seeds_and_hash_chain_equal_those_of_released_routers() -> None:
    seeds = KEY.seeds("model-a", 4, group="tenant-a", cache_salt="cache-a", lora_name="adapter-a")

    found = unpacked(KEY.sequence(TOKENS, 4, seeds))

    assert found == [4_363_769_719_052_127_296, 14_998_523_962_162_619_427, 13_920_914_207_884_994_756]


def test_tracking_hashes_of_images_and_lookahead_equal_those_of_released_routers() -> None:
    key = TrackingKey("2026-01", b"\x41" * 32)
    tokens = list(range(10))

    with_image = key.sequence(tokens, 4, key.seeds("model", 4), [[42], []])
    ahead = key.sequence(tokens, 4, key.seeds("model", 4, is_eagle=True), is_eagle=True)

    assert unpacked(with_image) == [13_077_030_603_177_067_515, 12_131_634_976_806_651_614]
    assert unpacked(ahead) == [18_351_479_723_295_049_348, 8_577_555_336_206_814_019]


@pytest.mark.parametrize(
    "seeds",
    [
        TrackingKey("2026-02", KEY.secret).seeds("m", 4),
        TrackingKey("2026-01", b"\x5b" * 32).seeds("m", 4),
        KEY.seeds("other", 4),
        KEY.seeds("m", 8),
        KEY.seeds("m", 4, group="other"),
        KEY.seeds("m", 4, cache_salt="salt"),
        KEY.seeds("m", 4, lora_name="adapter"),
        KEY.seeds("m", 4, is_eagle=True),
    ],
)
def test_tracking_hash_changes_with_everything_that_separates_prompts(seeds: tuple[int, int]) -> None:
    assert KEY.sequence(TOKENS, 4, seeds) != KEY.sequence(TOKENS, 4, KEY.seeds("m", 4))


def test_tracking_treats_an_empty_salt_as_none() -> None:
    assert KEY.seeds("m", 4, cache_salt="", lora_name="") == KEY.seeds("m", 4)


def test_tracking_prompt_shorter_than_a_block_has_no_hash() -> None:
    assert KEY.sequence([1, 2, 3], 4, KEY.seeds("m", 4)) == b""


def test_tracking_does_not_show_the_secret() -> None:
    assert "5a" not in repr(KEY) and "Z" not in repr(KEY)


@pytest.mark.parametrize(
    ("algorithm", "path", "key_id", "message"),
    [
        (PUBLIC, "key", None, "keyed-xxh3-v1"),
        (PUBLIC, None, "id", "keyed-xxh3-v1"),
        (KEYED, None, "id", "--router-tracking-key-file"),
        (KEYED, "key", None, "--router-tracking-key-id"),
        (KEYED, "key", " id", "--router-tracking-key-id"),
    ],
)
def test_tracking_refuses_contradictory_settings(
    algorithm: str, path: str | None, key_id: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tracking(algorithm, path, key_id)


def test_tracking_accepts_consistent_settings() -> None:
    check_tracking(PUBLIC, None, None)
    check_tracking(KEYED, "key", "2026-01")


def test_tracking_key_is_read_verbatim(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))

    assert read_key(str(path), "a") == TrackingKey("a", bytes(range(32)))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_tracking_refuses_a_key_of_wrong_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x" * length)

    with pytest.raises(ConfigError, match=f"{length} bytes"):
        read_key(str(path), "a")


def test_tracking_refuses_a_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "none"), "a")
