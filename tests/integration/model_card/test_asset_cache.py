"""Files of a card on a worker: fetched once, verified, and cached under their hash."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import msgspec
import pytest
from blake3 import blake3

from dynamo.core.codec import json_encode
from dynamo.core.errors import CannotConnect, ConfigError, DynamoException, InvalidArgument
from dynamo.model_card.asset_cache import PARTIAL, PROCESSOR_BYTES_MAX, AssetCache, CacheLimits
from dynamo.model_card.assets import PROCESSOR_FILE, moved, self_hosted
from dynamo.model_card.card import ModelFiles, build_card, mdc_sum
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.model_card import FileReference, ModelDeploymentCard

DATA = bytes(range(256)) * 4000


class Worker:
    """Web server that returns given files and injects faults."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.received_requests: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler, bytes], None] = whole
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                worker.received_requests.append(self.path)
                data = worker.files.get(unquote(self.path))
                if data is None:
                    self.send_error(404)
                else:
                    worker.answer(self, data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def show(self, path: str, file: str) -> str | None:
        with open(file, "rb") as data:
            return self.put(path, data.read())

    def put(self, path: str, data: bytes) -> str:
        self.files[path] = data
        return f"http://127.0.0.1:{self.server.server_port}{path}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def whole(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def cut_short(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])


def drip(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Send single bytes with pauses: never idle, never complete."""
    handler.send_response(200)
    handler.end_headers()
    try:
        for byte in data[:300]:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.01)
    except OSError:
        pass


def stop_sending(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.connection.settimeout(5)
    handler.rfile.read(1)  # Until the other side closes.


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def cache(tmp_path: Path) -> AssetCache:
    return AssetCache(str(tmp_path / "mdc"))


def reference(url: str, data: bytes = DATA, size: int | None = len(DATA)) -> FileReference:
    return FileReference(url, f"blake3:{blake3(data).hexdigest()}", size)


def blobs(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "mdc" / "blobs"))


def test_asset_cache_fetches_a_file_once_and_keeps_it_by_hash(
    worker: Worker, cache: AssetCache, tmp_path: Path
) -> None:
    file = reference(worker.put("/a/tokenizer.json", DATA))
    blob = cache.fetch(file)
    assert Path(blob).read_bytes() == DATA
    assert blobs(tmp_path) == [blake3(DATA).hexdigest()]
    assert AssetCache(str(tmp_path / "mdc")).fetch(file) == blob
    assert worker.received_requests == ["/a/tokenizer.json"]


def test_asset_cache_fetches_a_file_without_size(worker: Worker, cache: AssetCache) -> None:
    assert Path(cache.fetch(reference(worker.put("/t", DATA), size=None))).read_bytes() == DATA


def test_asset_cache_fetches_a_damaged_blob_again(worker: Worker, cache: AssetCache) -> None:
    file = reference(worker.put("/t", DATA))
    Path(cache.fetch(file)).write_bytes(DATA[:-1] + b"!")
    assert Path(cache.fetch(file)).read_bytes() == DATA
    assert len(worker.received_requests) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [(cut_short, CannotConnect), (drip, CannotConnect), (stop_sending, CannotConnect)],
)
def test_asset_cache_keeps_nothing_of_a_failed_download(
    worker: Worker, tmp_path: Path, answer: Callable[[BaseHTTPRequestHandler, bytes], None], error: type[Exception]
) -> None:
    worker.answer = answer
    cache = AssetCache(str(tmp_path / "mdc"), CacheLimits(deadline_s=0.2, silence_s=0.1))
    with pytest.raises(error, match=r"127\.0\.0\.1"):
        cache.fetch(reference(worker.put("/t", DATA)))
    assert blobs(tmp_path) == []
    worker.answer = whole
    assert Path(AssetCache(str(tmp_path / "mdc")).fetch(reference(worker.put("/t", DATA)))).read_bytes() == DATA


def test_asset_cache_refuses_bytes_of_another_checksum(worker: Worker, cache: AssetCache, tmp_path: Path) -> None:
    url = worker.put("/t", DATA[:-1] + b"!")
    with pytest.raises(InvalidArgument, match="has the hash"):
        cache.fetch(reference(url))
    worker.put("/t", DATA + b"!")
    with pytest.raises(InvalidArgument, match="more than"):
        cache.fetch(reference(url))
    assert blobs(tmp_path) == []


def test_asset_cache_does_not_request_a_file_beyond_the_limit(worker: Worker, tmp_path: Path) -> None:
    cache = AssetCache(str(tmp_path / "mdc"), CacheLimits(file_bytes_max=1000))
    url = worker.put("/t", DATA)
    with pytest.raises(InvalidArgument, match="1000"):
        cache.fetch(reference(url))
    assert worker.received_requests == []
    with pytest.raises(InvalidArgument, match="1000"):
        cache.fetch(reference(url, size=None))
    assert blobs(tmp_path) == []


@pytest.mark.parametrize(
    "checksum",
    ["blake3:../../../../etc/passwd", "blake3:" + "a" * 63, "blake3:" + "A" * 64, "sha256:" + "a" * 64, "", "blake3:"],
)
def test_asset_cache_refuses_an_invalid_checksum(worker: Worker, cache: AssetCache, checksum: str) -> None:
    with pytest.raises(InvalidArgument, match="checksum"):
        cache.fetch(FileReference(worker.put("/t", DATA), checksum))
    assert worker.received_requests == []


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://host:port/t", "http://127.0.0.1:99999/t"])
def test_asset_cache_reports_an_invalid_url_as_an_error_of_the_card(cache: AssetCache, url: str) -> None:
    with pytest.raises(DynamoException):
        cache.fetch(reference(url))


def test_asset_cache_error_names_an_unreachable_worker(cache: AssetCache, worker: Worker) -> None:
    with pytest.raises(CannotConnect, match="404"):
        cache.fetch(reference(f"http://127.0.0.1:{worker.server.server_port}/unknown"))
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:1/t"):
        cache.fetch(reference("http://127.0.0.1:1/t"))


def test_asset_cache_error_names_an_unwritable_cache(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "mdc").write_text("a file, no directory")
    with pytest.raises(ConfigError, match="blobs"):
        AssetCache(str(tmp_path / "mdc")).fetch(reference(worker.put("/t", DATA)))


def test_asset_cache_reports_a_full_disk_and_keeps_nothing(
    worker: Worker, cache: AssetCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            os.close(handle)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("dynamo.model_card.asset_cache.os.fdopen", Full)
    with pytest.raises(ConfigError, match="No space left"):
        cache.fetch(reference(worker.put("/t", DATA)))
    assert blobs(tmp_path) == []


def test_asset_cache_evicts_the_least_recently_used_file(worker: Worker, tmp_path: Path) -> None:
    cache = AssetCache(str(tmp_path / "mdc"), CacheLimits(total_bytes_max=2500))
    files = [reference(worker.put(f"/{n}", bytes([n]) * 1000), bytes([n]) * 1000, 1000) for n in range(4)]
    paths = [cache.fetch(file) for file in files[:2]]
    for age, path in enumerate(paths):
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    cache.fetch(files[0])  # A use: now the second file is the least recently used.
    cache.fetch(files[2])
    assert blobs(tmp_path) == sorted(file.checksum.removeprefix("blake3:") for file in (files[0], files[2]))


def test_asset_cache_removes_old_leftovers_of_killed_processes(worker: Worker, tmp_path: Path) -> None:
    directory = tmp_path / "mdc" / "blobs"
    directory.mkdir(parents=True)
    (directory / f"{PARTIAL}old").touch()
    (directory / f"{PARTIAL}new").touch()
    os.utime(directory / f"{PARTIAL}old", (0, 0))
    AssetCache(str(tmp_path / "mdc")).fetch(reference(worker.put("/t", DATA)))
    assert f"{PARTIAL}old" not in blobs(tmp_path)
    assert f"{PARTIAL}new" in blobs(tmp_path)


# A whole card ------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(worker: Worker, model_dir: Path) -> ModelDeploymentCard:
    local = build_card(str(model_dir), "My/Model", context_length=512, kv_cache_block_size=16)
    return self_hosted(local, EndpointId("dynamo", "backend", "generate"), worker.show)


def test_asset_cache_resolves_a_card_of_urls_to_the_same_files(
    card: ModelDeploymentCard, cache: AssetCache, model_dir: Path, tmp_path: Path
) -> None:
    local = cache.localise(card)
    assert mdc_sum(local) == mdc_sum(card)
    fetched, original = ModelFiles.from_card(local), ModelFiles.from_dir(str(model_dir))
    assert fetched.tokenizer == str(tmp_path / "mdc" / "by-slug" / "my_model" / mdc_sum(card) / "tokenizer.json")
    for one, other in ((fetched.config, original.config), (fetched.tokenizer, original.tokenizer)):
        assert Path(one).read_bytes() == Path(other).read_bytes()


def test_asset_cache_keeps_local_files_of_a_card_in_place(
    card: ModelDeploymentCard, cache: AssetCache, model_dir: Path
) -> None:
    mixed = moved(card, lambda name, file: str(model_dir / "config.json") if name == "hf_config_json" else file.path)
    assert ModelFiles.from_card(cache.localise(mixed)).config == str(model_dir / "config.json")


def test_asset_cache_confines_names_of_a_card_to_the_cache(
    card: ModelDeploymentCard, cache: AssetCache, tmp_path: Path
) -> None:
    card = msgspec.structs.replace(card, slug="../../../../escape")
    assert card.model_info is not None
    card.model_info["../../odd"] = card.model_info["hf_config_json"]
    cache.localise(card)
    assert sorted(os.listdir(tmp_path)) == sorted({"mdc", *os.listdir(tmp_path)})
    made = {os.path.join(top, name) for top, _, names in os.walk(tmp_path) for name in names}
    assert {path for path in made if "escape" in path} == {
        path for path in made if path.startswith(str(tmp_path / "mdc" / "by-slug")) and "escape" in path
    }
    assert not (tmp_path / "odd").exists()


# Files to which cards do not refer.

SHOWN = "/v1/metadata/dynamo/backend/generate/m/_base/"


def card_of_images(worker: Worker, **config: object) -> ModelDeploymentCard:
    """Return a card whose config.json is on the worker."""
    data = json_encode({"model_type": "qwen2_vl"} | config)
    file = reference(worker.put(SHOWN + "config.json", data), data, len(data))
    return ModelDeploymentCard(display_name="m", slug="m", model_info={"hf_config_json": file})


def config_path(card: ModelDeploymentCard) -> Path:
    assert card.model_info is not None
    return Path(card.model_info["hf_config_json"].path)


def test_asset_cache_fetches_the_processor_of_an_image_model_once(worker: Worker, cache: AssetCache) -> None:
    card = card_of_images(worker, image_token_id=5)
    worker.put(SHOWN + PROCESSOR_FILE, b'{"patch_size": 14}')
    for _ in range(2):
        local = cache.localise(card)
        assert (config_path(local).parent / PROCESSOR_FILE).read_bytes() == b'{"patch_size": 14}'
    assert worker.received_requests.count(SHOWN + PROCESSOR_FILE) == 1


def test_asset_cache_does_not_request_the_processor_of_a_text_model(worker: Worker, cache: AssetCache) -> None:
    cache.localise(card_of_images(worker))
    assert worker.received_requests == [SHOWN + "config.json"]


@pytest.mark.parametrize("shown", [None, b"{", b" " * (PROCESSOR_BYTES_MAX + 1)])
def test_asset_cache_serves_a_model_without_usable_processor(
    worker: Worker, cache: AssetCache, shown: bytes | None
) -> None:
    if shown is not None:
        worker.put(SHOWN + PROCESSOR_FILE, shown)
    local = cache.localise(card_of_images(worker, vision_config={}))
    assert os.listdir(config_path(local).parent) == ["config.json"]
