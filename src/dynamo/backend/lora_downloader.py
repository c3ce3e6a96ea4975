"""LoRADownloader: upstream's download and cache of LoRA adapters, over `AdapterFiles`."""

import asyncio
import os

from dynamo.backend.adapter_files import FILES, AdapterFiles
from dynamo.core.errors import InvalidArgument


class LoRADownloader:
    """Adapters by URI (`file://`, `hf://`, `s3://`), cached in `cache_path` or `DYN_LORA_PATH`."""

    def __init__(self, cache_path: str | None = None) -> None:
        self._files = AdapterFiles(cache_path, key_of=self.uri_to_cache_key, is_enabled=True)

    async def download_if_needed(self, lora_uri: str) -> str:
        """Return the adapter's directory, downloaded unless it is cached. Raise `RuntimeError`."""
        try:
            path = await asyncio.to_thread(self._files.hold, lora_uri)
        except InvalidArgument as error:
            raise RuntimeError(f"failed to download a LoRA adapter: {error}") from error
        self._files.release(path)
        return path

    def get_cache_path(self, cache_key: str) -> str:
        """Return the directory of a cache key."""
        return os.path.join(self._files.directory, cache_key)

    def is_cached(self, lora_uri: str) -> bool:
        """Return whether the cache has all files of this URI's adapter."""
        return self.validate_cached(self.uri_to_cache_key(lora_uri))

    def validate_cached(self, cache_key: str) -> bool:
        """Return whether the directory of a cache key has all files of an adapter."""
        paths = [os.path.join(self.get_cache_path(cache_key), name) for name in FILES]
        return all(os.path.isfile(path) and os.path.getsize(path) for path in paths)

    @staticmethod
    def uri_to_cache_key(uri: str) -> str:
        """Return the URI as the name of a directory."""
        return uri.replace("://", "__").replace("/", "_").replace("\\", "_").replace(".", "_")
