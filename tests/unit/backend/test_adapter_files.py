"""Directories of adapters: whole or not at all, and no more of them than there is room for."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.backend.adapter_files import ABANDONED_S, FILES, FRESH, AdapterFiles, fetch_from_hub, fetch_from_s3
from dynamo.core.errors import ConfigError, InvalidArgument


@pytest.fixture(autouse=True)
def _fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LORA_ENABLED", "true")


class Store:
    """A remote source that counts its requests."""

    def __init__(self, path: Path, *, bytes_max: int = 100_000) -> None:
        self.received_requests: list[str] = []
        self.now = 1000.0
        self.fails_after = len(FILES)
        self.path = path / "cache"
        self.files = AdapterFiles(str(self.path), bytes_max, {"far": self.fetch}, lambda: self.now)

    def fetch(self, rest: str, directory: str) -> None:
        self.received_requests.append(rest)
        for number, name in enumerate(FILES):
            if number == self.fails_after:
                raise InvalidArgument(f"far://{rest}: the line broke")
            Path(directory, name).write_bytes(rest.encode() * 1000)

    def hold(self, name: str) -> str:
        self.now += 1
        return self.files.hold(f"far://{name}")

    def kept(self) -> set[str]:
        return {json.loads((one / ".files.json").read_text())["uri"][6:] for one in self.path.iterdir()}


def test_local_adapter_directory_is_used_in_place(tmp_path: Path) -> None:
    files = AdapterFiles(str(tmp_path / "cache"))
    assert files.hold(str(tmp_path)) == files.hold(f"file://{tmp_path}") == str(tmp_path)
    files.release(str(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_remote_adapter_is_downloaded_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.hold("a") == store.hold("a")
    assert store.received_requests == ["a"]
    assert store.hold("a/b") != store.hold("a-b"), "names that look alike are different adapters"


def test_failed_adapter_download_leaves_no_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.fails_after = 1
    with pytest.raises(InvalidArgument, match="the line broke"):
        store.hold("a")
    assert list(store.path.iterdir()) == []
    store.fails_after = 2
    assert sorted(os.listdir(store.hold("a"))) == [".files.json", *FILES]


def test_adapter_download_without_weights_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.files._fetchers = {"far": lambda rest, directory: None}
    with pytest.raises(InvalidArgument, match=r"adapter_config.json does not exist"):
        store.hold("a")


@pytest.mark.parametrize("tear", [lambda path: path.unlink(), lambda path: path.write_bytes(b"to")])
@pytest.mark.parametrize("name", [*FILES, ".files.json"])
def test_damaged_adapter_file_is_downloaded_again(tmp_path: Path, tear: Callable[[Path], Any], name: str) -> None:
    store = Store(tmp_path)
    path = Path(store.hold("a"))
    tear(path / name)
    assert store.hold("a") == str(path)
    assert store.received_requests == ["a", "a"]
    assert (path / FILES[1]).read_bytes() == b"a" * 1000


def test_abandoned_download_directories_are_deleted_and_recent_ones_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, age in (("old", ABANDONED_S * 2), ("new", 1.0)):
        (store.path / f"{FRESH}{name}").mkdir(parents=True)
        os.utime(store.path / f"{FRESH}{name}", (store.now - age, store.now - age))
    store.hold("a")
    assert {one.name for one in store.path.iterdir() if one.name.startswith(FRESH)} == {f"{FRESH}new"}


def test_full_cache_evicts_the_least_recently_used_adapter_not_in_use(tmp_path: Path) -> None:
    store = Store(tmp_path, bytes_max=5000)  # Two adapters, with the records about them.
    paths = {name: store.hold(name) for name in ("a", "b")}
    for path in paths.values():
        store.files.release(path)
    store.hold("a")
    store.hold("c")
    assert store.kept() == {"a", "c"}
    store.hold("d")
    assert store.kept() == {"a", "c", "d"}, "all of them are in use"
    store.files.release(paths["a"])
    store.hold("e")
    assert store.kept() == {"c", "d", "e"}


def test_adapter_download_requires_a_supported_scheme_and_lora_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidArgument, match=r"expected file://, far://$"):
        store.files.hold("ftp://a")
    monkeypatch.setenv("DYN_LORA_ENABLED", "false")
    with pytest.raises(InvalidArgument, match="DYN_LORA_ENABLED"):
        store.hold("a")


def test_adapter_cache_directory_and_size_are_read_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_LORA_PATH", str(tmp_path / "there"))
    assert AdapterFiles().directory == str(tmp_path / "there")
    monkeypatch.setenv("DYN_LORA_CACHE_MB", "many")
    store = Store(tmp_path)
    store.files._bytes_max = None
    with pytest.raises(ConfigError, match="DYN_LORA_CACHE_MB"):
        store.hold("a")


@pytest.mark.parametrize("uri", ["bucket", "/a", "bucket/"])
def test_s3_address_without_bucket_or_prefix_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected s3://bucket/prefix"):
        fetch_from_s3(uri, str(tmp_path))


def test_hub_download_fetches_the_two_files_of_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    requested: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        requested.append((name, options))
        (tmp_path / ".cache").mkdir()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_from_hub("someone/tuned@v2", str(tmp_path))
    want = {"revision": "v2", "allow_patterns": list(FILES), "local_dir": str(tmp_path)}
    assert requested == [("someone/tuned", want)]
    assert list(tmp_path.iterdir()) == [], "what the hub's client notes down is no part of the adapter"

    def refuse(name: str, **options: Any) -> str:
        raise OSError("no such repository\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InvalidArgument, match=r"hf://a/b: no such repository$"):
        fetch_from_hub("a/b", str(tmp_path))
