"""Adapter files: local directories of LoRA adapters, given their URIs; downloads are cached on disk.

    file:///path, /path       used in place
    hf://owner/name[@rev]     from the Hugging Face hub
    s3://bucket/prefix        from an object store

A directory of the cache is complete or absent: it is filled under a temporary name, its file sizes are recorded, and
then it is renamed. A directory whose file sizes differ from the record is fetched again. When the cache exceeds its
limit, the least recently used adapters that are not loaded are deleted.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from blake3 import blake3

from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import InvalidArgument

logger = logging.getLogger(__name__)

FILES = ("adapter_config.json", "adapter_model.safetensors")
MANIFEST = ".files.json"
FRESH = ".new-"
"""Name prefix of a directory that is still being filled."""
ABANDONED_S = 3600.0  # Longer than any download: the process that started it has died.
DOWNLOAD_S = 600.0  # Time limit of one adapter's download.
FILE_BYTES_MAX = 8 << 30  # A larger file is a model, not an adapter.
CACHE_MB = 16_384

Fetch = Callable[[str, str], None]
"""Function that fetches the URI without its scheme into a directory. Raises `InvalidArgument`."""


class AdapterFiles:
    """Local directories of adapters by URI. Blocks during downloads; thread-safe, one URI at a time."""

    def __init__(
        self,
        directory: str | None = None,
        bytes_max: int | None = None,
        fetchers: Mapping[str, Fetch] | None = None,
        wall_clock: Callable[[], float] = time.time,
        key_of: Callable[[str], str] | None = None,
        is_enabled: bool | None = None,
    ) -> None:
        """Defaults: `DYN_LORA_PATH`, `DYN_LORA_CACHE_MB`, the hub, S3 and `DYN_LORA_ENABLED`; `key_of` names a URI."""
        self._given = directory
        self._bytes_max = bytes_max
        self._fetchers = fetchers if fetchers is not None else {"hf": fetch_from_hub, "s3": fetch_from_s3}
        self._wall_clock = wall_clock
        self._key_of = key_of or _name_of
        self._is_enabled = is_enabled
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}

    @property
    def directory(self) -> str:
        """The directory of the cache."""
        return os.path.expanduser(self._given or setting("DYN_LORA_PATH", "~/.cache/dynamo_loras", str))

    def hold(self, uri: str) -> str:
        """Return the adapter's directory and protect it from deletion until `release`. Raise `InvalidArgument`."""
        scheme, found, rest = uri.partition("://")
        if not found or scheme == "file":
            path = rest if found else uri
            if not os.path.isdir(path):
                raise InvalidArgument(f"{uri}: no such directory")
            return path
        is_enabled = self._is_enabled
        if not (setting("DYN_LORA_ENABLED", False, read_bool) if is_enabled is None else is_enabled):
            raise InvalidArgument(f"{uri}: downloading adapters requires DYN_LORA_ENABLED=true")
        fetch = self._fetchers.get(scheme)
        if fetch is None:
            raise InvalidArgument(f"{uri}: expected file://, {' or '.join(f'{one}://' for one in self._fetchers)}")
        with self._lock:
            path = os.path.join(self.directory, self._key_of(uri))
            if not _is_whole(path):
                self._fetch(fetch, uri, rest, path)
            now = self._wall_clock()
            os.utime(os.path.join(path, MANIFEST), (now, now))
            self._used[path] = self._used.get(path, 0) + 1
            self._shrink()
        return path

    def release(self, path: str) -> None:
        """Release a directory; it stays until its space is needed."""
        with self._lock:
            left = self._used.pop(path, 0) - 1
            if left > 0:
                self._used[path] = left

    def _fetch(self, fetch: Fetch, uri: str, rest: str, path: str) -> None:
        try:
            os.makedirs(self.directory, exist_ok=True)
            self._sweep()
            fresh = tempfile.mkdtemp(prefix=FRESH, dir=self.directory)
            try:
                fetch(rest, fresh)
                _seal(fresh, uri)
                shutil.rmtree(path, ignore_errors=True)  # Incomplete directory.
                os.rename(fresh, path)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        except OSError as error:
            if not _is_whole(path):  # Another process may have completed the same download.
                raise InvalidArgument(f"{uri}: {error}") from error

    def _sweep(self) -> None:
        """Delete incomplete downloads of processes that have died."""
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            with contextlib.suppress(OSError):
                if name.startswith(FRESH) and self._wall_clock() - os.path.getmtime(path) > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _shrink(self) -> None:
        limit = self._bytes_max
        if limit is None:
            limit = max(0, setting("DYN_LORA_CACHE_MB", CACHE_MB, int)) << 20
        kept: list[tuple[float, int, str]] = []
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            with contextlib.suppress(OSError):
                kept.append((os.path.getmtime(os.path.join(path, MANIFEST)), _size_of(path), path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= limit:
                return
            if path not in self._used:
                logger.info("deleted %s: the adapter cache is full", path)
                shutil.rmtree(path, ignore_errors=True)
                total -= size


def fetch_from_s3(rest: str, directory: str) -> None:
    """Fetch `bucket/prefix` from the store set by the AWS variables. Raise `InvalidArgument`."""
    from dynamo.kvbm.physical.objects import ObjectFailure  # Imports numpy.
    from dynamo.kvbm.physical.s3 import Credentials, S3Objects

    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not bucket or not prefix:
        raise InvalidArgument(f"s3://{rest}: expected s3://bucket/prefix")
    variables = environ()
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = next(
        (
            found
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
            if (found := variables.get(name))
        ),
        f"https://s3.{region}.amazonaws.com",
    )
    credentials = Credentials(
        variables.get("AWS_ACCESS_KEY_ID", ""),
        variables.get("AWS_SECRET_ACCESS_KEY", ""),
        region,
        variables.get("AWS_SESSION_TOKEN", ""),
    )
    store = S3Objects(endpoint, bucket, credentials, variable="AWS_ENDPOINT_URL")
    try:
        for name in FILES:
            with open(os.path.join(directory, name), "wb") as file:
                if not store.download(f"{prefix}/{name}", file, FILE_BYTES_MAX, DOWNLOAD_S):
                    raise InvalidArgument(f"s3://{bucket}/{prefix}: {name} does not exist")
    except ObjectFailure as error:
        raise InvalidArgument(f"s3://{bucket}/{prefix}: {error}") from None
    finally:
        store.close()


def fetch_from_hub(rest: str, directory: str) -> None:
    """Fetch `owner/name[@revision]` from the Hugging Face hub. Raise `InvalidArgument`."""
    from huggingface_hub import snapshot_download

    name, _, revision = rest.partition("@")
    try:
        snapshot_download(name, revision=revision or None, allow_patterns=list(FILES), local_dir=directory)
    except (ValueError, OSError) as error:  # The hub client's errors are subclasses of these.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidArgument(f"hf://{rest}: {reason}") from None
    shutil.rmtree(os.path.join(directory, ".cache"), ignore_errors=True)  # Metadata of the hub client.


def _name_of(uri: str) -> str:
    """Return the name of a URI's directory: readable, and unique per URI."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", uri.partition("://")[2]).strip("-.")[-60:]
    return f"{readable}-{blake3(uri.encode()).hexdigest()[:16]}"


def _seal(directory: str, uri: str) -> None:
    """Sync the files to disk and record their sizes. Raise `InvalidArgument` if a required file is missing."""
    sizes: dict[str, int] = {}
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            sizes[name] = os.path.getsize(path)
    missing = [name for name in FILES if not sizes.get(name)]
    if missing:
        raise InvalidArgument(f"{uri}: {missing[0]} does not exist")
    with open(os.path.join(directory, MANIFEST), "w", encoding="utf-8") as out:
        json.dump({"uri": uri, "files": sizes}, out)
        out.flush()
        os.fsync(out.fileno())


def _is_whole(directory: str) -> bool:
    try:
        with open(os.path.join(directory, MANIFEST), encoding="utf-8") as file:
            sizes = json.load(file)["files"]
        return all(os.path.getsize(os.path.join(directory, name)) == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _size_of(directory: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
