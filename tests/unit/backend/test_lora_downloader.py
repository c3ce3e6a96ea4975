"""Upstream's interface to cached adapters."""

from pathlib import Path

import pytest

from dynamo.backend.adapter_files import FILES
from dynamo.llm import LoRADownloader


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("file:///a/b", "file___a_b"),
        ("s3://b/k-a.b/c", "s3__b_k-a_b_c"),
        ("hf://org/name@main", "hf__org_name@main"),
        ("/tmp/x", "_tmp_x"),
    ],
)
def test_cache_key_is_the_uri_as_a_name(uri: str, key: str) -> None:
    assert LoRADownloader.uri_to_cache_key(uri) == key


async def test_local_adapter_is_used_in_place(tmp_path: Path) -> None:
    downloader = LoRADownloader(str(tmp_path / "cache"))
    assert await downloader.download_if_needed(f"file://{tmp_path}") == str(tmp_path)
    with pytest.raises(RuntimeError, match="no such directory"):
        await downloader.download_if_needed("file:///no/such/directory")


def test_cached_adapter_has_all_files(tmp_path: Path) -> None:
    downloader = LoRADownloader(str(tmp_path))
    key = LoRADownloader.uri_to_cache_key("s3://b/a")
    directory = Path(downloader.get_cache_path(key))
    assert directory == tmp_path / "s3__b_a"
    assert not downloader.is_cached("s3://b/a")
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(b"x")
    assert downloader.is_cached("s3://b/a")
    assert downloader.validate_cached(key)
