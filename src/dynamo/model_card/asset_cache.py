"""AssetCache: fetches the files of a card from its worker once, and stores them by their hash.

    ~/.cache/dynamo/mdc/blobs/<blake3>                          the bytes
    ~/.cache/dynamo/mdc/by-slug/<slug>/<checksum>/<file>        links that give them their names

The layout is the same as upstream's. A blob appears as a whole or not at all, and only if its bytes hash to its name.
No part of a path comes from the network: blobs are named by digits, links by the formats that are known here.
All methods block: call them in a thread.
"""

import contextlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urljoin, urlsplit

from msgspec import Struct

from dynamo.core.boundaries import Rollback
from dynamo.core.codec import json_decode
from dynamo.core.config import environ
from dynamo.core.errors import CannotConnect, ConfigError, DynamoException, InvalidArgument, WorkerUnavailable
from dynamo.core.http_client import BlockingHttpClient, Deadlines
from dynamo.core.private_paths import unlink_all
from dynamo.model_card.assets import PROCESSOR_FILE, is_remote, moved
from dynamo.model_card.card import CHECKSUM_PREFIX, mdc_sum, read_json, slug_of
from dynamo.protocols.model_card import FileReference, ModelDeploymentCard

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
PARTIAL = ".partial-"
PARTIAL_AGE_S = 3600.0  # Older partial files come from killed processes; younger ones may be downloads in progress.

NAMES = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "tik_token_model": "tiktoken.model",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_generation_config_json": "generation_config.json",
    "hf_chat_template": "chat_template.jinja",
    "hf_chat_template_jinja": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
}
"""File name of each format."""

PROCESSOR_BYTES_MAX = 1 << 20  # Usual files have a few kilobytes.
TAKES_IMAGES = frozenset(("vision_config", "image_token_id", "image_token_index"))
"""Keys of a config.json that mark a model that takes images."""

_CHECKSUM = re.compile(re.escape(CHECKSUM_PREFIX) + r"([0-9a-f]{64})")


class CacheLimits(Struct, frozen=True, kw_only=True):
    """Limits of sizes and times."""

    file_bytes_max: int = 1 << 30
    """Maximum size of one file; tokenizers have tens of megabytes."""
    total_bytes_max: int = 4 << 30
    deadline_s: float = 60.0
    """Maximum time for one file, whatever the rate of the transfer."""
    silence_s: float = 10.0
    """Maximum time for one step of a transfer."""


class AssetCache:
    """Directory of blobs, which any number of processes may share."""

    def __init__(self, directory: str | None = None, limits: CacheLimits | None = None) -> None:
        self._directory = directory or os.path.join(_home(), ".cache", "dynamo", "mdc")
        self._blobs = os.path.join(self._directory, "blobs")
        self._limits = limits or CacheLimits()

    def localise(self, card: ModelDeploymentCard) -> ModelDeploymentCard:
        """Return the card with every remote file fetched.

        Raise `CannotConnect` if a worker does not send a file, `InvalidArgument` if the content differs from the card's
        checksum or size, and `ConfigError` if it cannot be stored.
        """
        links = os.path.join("by-slug", slug_of(card.slug) or "_", mdc_sum(card))

        def path_of(name: str, file: FileReference) -> str:
            return self._link(links, name, self.fetch(file)) if is_remote(file) else file.path

        local = moved(card, path_of)
        configs = zip((card.model_info or {}).values(), (local.model_info or {}).values(), strict=True)
        for file, fetched in configs:
            if is_remote(file):
                self._fetch_processor(file.path, fetched.path)
        return local

    def _fetch_processor(self, url: str, config: str) -> None:
        """Fetch the image processor's file of a model that takes images, if its worker serves one in config.json's directory.

        The card has no checksum of the file. This is acceptable because it is small and only parsed as JSON; without it,
        less is known about images.
        """
        place = os.path.join(os.path.dirname(config), PROCESSOR_FILE)
        if os.path.basename(config) != NAMES["hf_config_json"] or os.path.exists(place):
            return
        processor = FileReference(urljoin(url, PROCESSOR_FILE), "", None)
        data = bytearray()
        try:
            if not TAKES_IMAGES.intersection(read_json(config)):
                return
            self._transfer(processor, data.extend, PROCESSOR_BYTES_MAX)
            json_decode(bytes(data))
            handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=os.path.dirname(place))
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.replace(partial, place)
        except (DynamoException, OSError, ValueError) as error:
            logger.info("failed to fetch the image processor's file, image tokens in prompts are unknown: %s", error)

    def fetch(self, file: FileReference) -> str:
        """Return the path of a remote file's content, fetched unless it is cached. Raise the errors of `localise`."""
        match = _CHECKSUM.fullmatch(file.checksum)
        if match is None:
            raise InvalidArgument(f"{file.path}: checksum {file.checksum[:80]!r}: must be {CHECKSUM_PREFIX}<64 digits>")
        digest = match[1]
        size_max = self._limits.file_bytes_max
        if file.size is not None and file.size > size_max:
            raise InvalidArgument(f"{file.path}: size {file.size} exceeds the limit of {size_max} bytes")
        blob = os.path.join(self._blobs, digest)
        try:
            os.makedirs(self._blobs, exist_ok=True)
            if not self._is_sound(blob, digest):
                self._download(file, digest, blob)
                self._prune(keep=digest)
        except OSError as error:
            raise ConfigError(f"{self._blobs}: {error.strerror or error}") from None
        return blob

    def _is_sound(self, blob: str, digest: str) -> bool:
        """Return whether the blob is cached and intact; its modification time records the use."""
        from blake3 import blake3  # Most models have no remote files.

        try:
            with open(blob, "rb") as data:
                hasher = blake3()
                while chunk := data.read(CHUNK_BYTES):
                    hasher.update(chunk)
            if hasher.hexdigest() != digest:
                logger.warning("cached file %s is corrupt; fetching it again", blob)
                return False
            os.utime(blob)
        except FileNotFoundError:
            return False
        except PermissionError:
            logger.debug("cached file %s belongs to another user", blob)
        return True

    def _download(self, file: FileReference, digest: str, blob: str) -> None:
        """Write the content to a temporary file, and rename it to the blob once its hash is verified."""
        from blake3 import blake3  # As above.

        began = time.monotonic()
        handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=self._blobs)
        with Rollback(lambda: unlink_all(partial)):
            with os.fdopen(handle, "wb") as out:
                hasher = blake3()
                size = self._transfer(file, lambda chunk: (hasher.update(chunk), out.write(chunk)))
            _check(file, hasher.hexdigest(), digest)
            os.chmod(partial, 0o644)
            os.replace(partial, blob)
        logger.info("fetched %s: %d bytes in %.0f ms", file.path, size, (time.monotonic() - began) * 1e3)

    def _transfer(self, file: FileReference, take: Callable[[bytes], object], size_max: int | None = None) -> int:
        """Pass the body of the URL to `take` in chunks; return its length."""
        limits = self._limits
        if size_max is None:
            size_max = limits.file_bytes_max if file.size is None else file.size
        size = 0
        client, path = self._client(file.path)
        try:
            with client.request("GET", path) as response:
                if response.status != HTTPStatus.OK:
                    raise CannotConnect(f"worker returned HTTP status {response.status}")
                while (chunk := response.part()) is not None:
                    size += len(chunk)
                    if size > size_max:
                        raise InvalidArgument(f"{file.path}: more than the expected {size_max} bytes")
                    take(chunk)
        except WorkerUnavailable as error:
            raise CannotConnect(f"{file.path}: {error}") from None
        if file.size is not None and size != file.size:
            raise CannotConnect(f"{file.path}: received {size} of {file.size} bytes")
        return size

    def _client(self, url: str) -> tuple[BlockingHttpClient, str]:
        """Return a client of the URL's host, and the path. Raise `InvalidArgument` for a URL without a host."""
        silence_s = self._limits.silence_s
        deadlines = Deadlines(silence_s, silence_s, silence_s, self._limits.deadline_s)
        try:
            target = urlsplit(url)
            client = BlockingHttpClient(f"{target.scheme}://{target.netloc}", deadlines, setting="model file")
        except (ValueError, ConfigError) as error:
            raise InvalidArgument(f"{url!r}: {error}") from None
        return client, (target.path or "/") + (f"?{target.query}" if target.query else "")

    def _link(self, directory: str, name: str, blob: str) -> str:
        """Return a link to the blob with the file name of its format; the blob itself if links are not possible."""
        word = NAMES.get(name)
        if word is None:
            return blob
        place = os.path.join(self._directory, directory)
        link = os.path.join(place, word)
        try:
            os.makedirs(place, exist_ok=True)
            made = os.path.join(place, f"{PARTIAL}{os.getpid()}-{word}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
            os.symlink(os.path.relpath(blob, place), made)
            os.replace(made, link)
        except OSError as error:
            logger.debug("failed to link %s: %s", link, error)
            return blob
        return link

    def _prune(self, keep: str) -> None:
        """Remove the least recently used blobs down to the limit, and partial files of killed processes."""
        entries = []
        now_s = time.time()
        with os.scandir(self._blobs) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(PARTIAL):
                        if now_s - status.st_mtime > PARTIAL_AGE_S:
                            os.unlink(entry.path)
                    else:
                        entries.append((status.st_mtime, status.st_size, entry.path, entry.name))
        total = sum(size for _, size, _, _ in entries)
        for _, size, path, name in sorted(entries):
            if total <= self._limits.total_bytes_max:
                return
            if name != keep:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size


def _check(file: FileReference, seen: str, digest: str) -> None:
    if seen != digest:
        raise InvalidArgument(f"{file.path}: content has the hash {seen}, expected {digest}")


def _home() -> str:
    return environ().get("HOME") or os.path.expanduser("~")
