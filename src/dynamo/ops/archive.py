"""Archive: a bundle of text files as tar.gz, written with mode 0600, and read from an archive or a directory within limits."""

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping

from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import private_opener, unlink_all

FILES_MAX = 2000  # A bundle of a large cluster has some hundreds; more means that the directory is something else.
FILE_BYTES_MAX = 8 << 20  # The end of longer files is read: the last lines of a log name the failure.
TOTAL_BYTES_MAX = 256 << 20


def write_archive(path: str, files: Mapping[str, str], now: float, *, setting: str = "--bundle") -> None:
    """Write files as PATH, a tar.gz with one directory named after it.

    Raise `ConfigError`, which names the `setting`, if that fails.
    """
    top = os.path.basename(path).removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz") or "bundle"
    temporary = f"{path}.partial"
    try:
        with (
            open(temporary, "wb", opener=private_opener) as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=now) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, text in sorted(files.items()):
                data = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{top}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(now), 0o600
                archive.addfile(entry, io.BytesIO(data))
        os.replace(temporary, path)
    except OSError as error:
        unlink_all(temporary)
        raise ConfigError(f"{setting} {path}: {error.strerror or error}") from None


def read_files(path: str) -> dict[str, str]:
    """Return the text files of a bundle, an archive or a directory, by their path in it. Raise `ConfigError`."""
    try:
        pairs = _of_directory(path) if os.path.isdir(path) else _of_archive(path)
        found: dict[str, str] = {}
        total = 0
        for name, data in pairs:
            total += len(data)
            if len(found) >= FILES_MAX or total > TOTAL_BYTES_MAX:
                raise ConfigError(f"{path}: more than {FILES_MAX} files or {TOTAL_BYTES_MAX >> 20} MiB; not a bundle")
            found[name] = data.decode(errors="replace")
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot read the bundle: {reason}") from None
    return found


def tail_of(path: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Return the end of a file. Raise `OSError`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - bytes_max))
        return file.read(bytes_max)


def _of_directory(path: str) -> Iterator[tuple[str, bytes]]:
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            if os.path.isfile(full) and not os.path.islink(full):
                yield os.path.relpath(full, path), tail_of(full)


def _of_archive(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files without the common first directory; nothing is extracted to disk."""
    with tarfile.open(path, mode="r:*") as archive:
        for entry in archive:
            if not entry.isfile():
                continue
            file = archive.extractfile(entry)
            assert file is not None, "a regular file"
            if entry.size > FILE_BYTES_MAX:
                file.seek(entry.size - FILE_BYTES_MAX)
            yield entry.name.partition("/")[2] or entry.name, file.read(FILE_BYTES_MAX)
