"""AssetCache: the files of a card that lie on a worker, fetched once and kept by what they hash to.

    ~/.cache/dynamo/mdc/blobs/<blake3>                          the bytes
    ~/.cache/dynamo/mdc/by-slug/<slug>/<checksum>/<file>        links that give them their names

The layout is upstream's (serving-plane.md §2.4). A blob appears whole or not at all, and only if its bytes hash to its
name. No part of a path comes from the network: blobs are named by digits, links by the formats that are known here.
Everything blocks: call it in a thread.
"""

import contextlib
import http.client
import logging
import os
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from blake3 import blake3

from dynamo.core.codec import json_decode
from dynamo.core.config import environ
from dynamo.core.errors import CannotConnect, ConfigError, DynamoException, InvalidArgument
from dynamo.model_card.assets import PROCESSOR_FILE, is_remote, moved
from dynamo.model_card.card import CHECKSUM_PREFIX, mdc_sum, read_json, slug_of
from dynamo.protocols.model_card import FileReference, ModelDeploymentCard

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
PARTIAL = ".partial-"
PARTIAL_AGE_S = 3600.0  # What a killed process left unfinished; a younger one may be another process's download.

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
"""What a file of each format is called."""

PROCESSOR_BYTES_MAX = 1 << 20  # A few kilobytes are usual.
TAKES_IMAGES = frozenset(("vision_config", "image_token_id", "image_token_index"))
"""What the config.json of a model says that does."""

_CHECKSUM = re.compile(re.escape(CHECKSUM_PREFIX) + r"([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Sizes and times."""

    file_bytes_max: int = 1 << 30
    """A tokenizer is tens of megabytes; a gigabyte is no tokenizer."""
    total_bytes_max: int = 4 << 30
    deadline_s: float = 60.0
    """For one file, however the worker doles it out."""
    silence_s: float = 10.0
    """For one step of a transfer."""


class AssetCache:
    """One directory of blobs; any number of processes may share it."""

    def __init__(self, directory: str | None = None, limits: CacheLimits | None = None) -> None:
        self._directory = directory or os.path.join(_home(), ".cache", "dynamo", "mdc")
        self._blobs = os.path.join(self._directory, "blobs")
        self._limits = limits or CacheLimits()

    def localise(self, card: ModelDeploymentCard) -> ModelDeploymentCard:
        """The card with every remote file fetched.

        Raises `CannotConnect` when a worker does not hand it over, `InvalidArgument` when what it hands over is not
        what the card says, `ConfigError` when it cannot be kept.
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
        """Fetches the processor's file of a model that takes images, where its worker shows one beside config.json.

        No card says what it hashes to: it is small, it is only ever read as JSON, and without it less is known of images.
        """
        place = os.path.join(os.path.dirname(config), PROCESSOR_FILE)
        if os.path.basename(config) != NAMES["hf_config_json"] or os.path.exists(place):
            return
        beside = FileReference(urljoin(url, PROCESSOR_FILE), "", None)
        data = bytearray()
        try:
            if not TAKES_IMAGES.intersection(read_json(config)):
                return
            self._transfer(beside, data.extend, PROCESSOR_BYTES_MAX)
            json_decode(bytes(data))
            handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=os.path.dirname(place))
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.replace(partial, place)
        except (DynamoException, OSError, ValueError) as error:
            logger.info("what images become in prompts is not known: %s", error)

    def fetch(self, file: FileReference) -> str:
        """The path of a remote file's bytes, fetched unless they are here. Raises as `localise`."""
        match = _CHECKSUM.fullmatch(file.checksum)
        if match is None:
            raise InvalidArgument(
                f"{file.path}: the checksum {file.checksum[:80]!r} is not {CHECKSUM_PREFIX}<64 digits>"
            )
        digest = match[1]
        size_max = self._limits.file_bytes_max
        if file.size is not None and file.size > size_max:
            raise InvalidArgument(f"{file.path}: {file.size} bytes are announced, at most {size_max} are fetched")
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
        """Whether the blob is here and still what its name says; a use is noted in its modification time."""
        try:
            with open(blob, "rb") as data:
                hasher = blake3()
                while chunk := data.read(CHUNK_BYTES):
                    hasher.update(chunk)
            if hasher.hexdigest() != digest:
                logger.warning("the cached file %s is broken and is fetched again", blob)
                return False
            os.utime(blob)
        except FileNotFoundError:
            return False
        except PermissionError:
            logger.debug("the cached file %s belongs to somebody else", blob)
        return True

    def _download(self, file: FileReference, digest: str, blob: str) -> None:
        """Writes the blob beside its place and moves it there when it has proved to be the right one."""
        began = time.monotonic()
        handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=self._blobs)
        try:
            with os.fdopen(handle, "wb") as out:
                hasher = blake3()
                size = self._transfer(file, lambda chunk: (hasher.update(chunk), out.write(chunk)))
            _check(file, hasher.hexdigest(), digest)
            os.chmod(partial, 0o644)
            os.replace(partial, blob)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        logger.info("fetched %s: %d bytes in %.0f ms", file.path, size, (time.monotonic() - began) * 1e3)

    def _transfer(self, file: FileReference, take: Callable[[bytes], object], size_max: int | None = None) -> int:
        """Hands over the body of the URL piece by piece; returns its length."""
        limits = self._limits
        if size_max is None:
            size_max = limits.file_bytes_max if file.size is None else file.size
        size = 0
        connection = _connection(file.path, limits.silence_s)
        late = threading.Event()
        timer: threading.Timer | None = None
        try:
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                connection.connect()
                timer = _deadline(limits.deadline_s, connection.sock, late)
                target = urlsplit(file.path)
                connection.request("GET", (target.path or "/") + (f"?{target.query}" if target.query else ""))
                response = closing.enter_context(contextlib.closing(connection.getresponse()))
                if response.status != http.client.OK:
                    raise CannotConnect(f"{file.path}: the worker answered {response.status}")
                while chunk := response.read1(CHUNK_BYTES):
                    size += len(chunk)
                    if size > size_max:
                        raise InvalidArgument(f"{file.path}: more than the {size_max} bytes that it should have")
                    _keep(take, chunk)
        except _NotKept as error:
            raise error.cause from None
        except (OSError, http.client.HTTPException) as error:
            raise CannotConnect(f"{file.path}: {_why(error, late, limits.deadline_s)}") from None
        finally:
            if timer is not None:
                timer.cancel()
        if late.is_set():
            raise CannotConnect(f"{file.path}: not fetched within {limits.deadline_s:g} s")
        if file.size is not None and size != file.size:
            raise CannotConnect(f"{file.path}: {size} of {file.size} bytes came")
        return size

    def _link(self, directory: str, name: str, blob: str) -> str:
        """A link to the blob under the name that its format has; the blob itself where there can be no links."""
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
            logger.debug("no link %s: %s", link, error)
            return blob
        return link

    def _prune(self, keep: str) -> None:
        """Removes what was unused longest, down to the limit, and what killed processes left."""
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


class _NotKept(Exception):
    """Our own disk failed in the middle of a transfer: not the worker's fault."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _check(file: FileReference, seen: str, digest: str) -> None:
    if seen != digest:
        raise InvalidArgument(f"{file.path}: its bytes hash to {seen}, not to {digest}")


def _deadline(seconds: float, sock: socket.socket, late: threading.Event) -> threading.Timer:
    """Whoever reads from this socket hears its end when the time is over."""

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def _why(error: Exception, late: threading.Event, deadline_s: float) -> str:
    return f"not fetched within {deadline_s:g} s" if late.is_set() else str(error) or type(error).__name__


def _keep(take: Callable[[bytes], object], chunk: bytes) -> None:
    try:
        take(chunk)
    except OSError as error:
        raise _NotKept(error) from None


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the URL's host. Raises `InvalidArgument` for a URL that names none."""
    try:
        target = urlsplit(url)
        host, port = target.hostname, target.port
    except ValueError as error:
        raise InvalidArgument(f"{url!r}: {error}") from None
    if not host:
        raise InvalidArgument(f"{url!r}: it names no host")
    if target.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _home() -> str:
    return environ().get("HOME") or os.path.expanduser("~")
