"""Storage of generated media in any file system of fsspec."""

import asyncio
from typing import Any

try:
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem
except ImportError:  # Checked where it is used: most workers store nothing.
    fsspec = None


def get_fs(fs_url: str) -> Any:
    """Return the file system at a URL such as `file:///tmp/media` or `s3://bucket/path`."""
    if fsspec is None:
        raise ImportError("storage of media requires fsspec: pip install fsspec")
    scheme, _, root = fs_url.rpartition("://")
    creates = {"auto_mkdir": True} if scheme in ("", "file") else {}
    return DirFileSystem(fs=fsspec.filesystem(scheme or "file", **creates), path=root if scheme else "/")


def get_media_url(fs: Any, storage_path: str, base_url: str | None = None) -> str:
    """Return the URL of a file: below `base_url`, else in the file system itself."""
    if base_url:
        return "/".join((base_url.rstrip("/"), storage_path))
    protocols = fs.fs.protocol
    scheme = protocols if isinstance(protocols, str) else next(iter(protocols))
    return f"{scheme}://{fs.path}/{storage_path}"


async def upload_to_fs(fs: Any, storage_path: str, data: bytes, base_url: str | None = None) -> str:
    """Write a file and return its URL."""
    await asyncio.to_thread(fs.pipe, storage_path, data)
    return get_media_url(fs, storage_path, base_url)
