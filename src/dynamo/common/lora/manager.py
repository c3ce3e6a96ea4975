"""LoRAManager: download of adapters, from custom sources or by the runtime's downloader."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynamo.common.lora.once import OnceLock
from dynamo.common.utils.env import env_bool
from dynamo.core.boundaries import ErrorBoundary
from dynamo.llm import LoRADownloader


class LoRASourceProtocol(Protocol):
    """Source of adapters of one URI scheme."""

    async def download(self, lora_uri: str, dest_path: Path) -> Path: ...

    async def exists(self, lora_uri: str) -> bool: ...


class LoRAManager:
    """Downloader of adapters with a cache on disk."""

    def __init__(self, cache_path: Path | None = None) -> None:
        self._downloader: Any = LoRADownloader(str(cache_path) if cache_path else None)
        self._sources: dict[str, LoRASourceProtocol] = {}

    def register_custom_source(self, scheme: str, source: LoRASourceProtocol) -> None:
        """Download URIs of a scheme from `source` instead of with the runtime's downloader."""
        self._sources[scheme] = source

    async def download_lora(self, lora_uri: str) -> dict[str, Any]:
        """Return `{"status": "success", "local_path"}`, or `{"status": "error", "message"}`."""
        failures: list[Exception] = []
        with ErrorBoundary(failures.append):  # Sources raise errors of any type; the response reports them.
            return {"status": "success", "local_path": str(await self._downloaded(lora_uri))}
        return {"status": "error", "message": str(failures[0])}

    async def _downloaded(self, lora_uri: str) -> Path:
        """Return the directory of an adapter. Raise an error of the source, or `FileNotFoundError`."""
        scheme, separator, _ = lora_uri.partition("://")
        source = self._sources.get(scheme) if separator else None
        if source is None:
            return Path(await self._downloader.download_if_needed(lora_uri))
        if not await source.exists(lora_uri):
            raise FileNotFoundError(f"no adapter at {lora_uri}")
        key = self._downloader.uri_to_cache_key(lora_uri)
        return await source.download(lora_uri, Path(self._downloader.get_cache_path(key)))

    def is_cached(self, lora_uri: str) -> bool:
        """Return whether an adapter is on disk."""
        is_cached: bool = self._downloader.is_cached(lora_uri)
        return is_cached


@dataclass(frozen=True)
class LoRAInfo:
    """A loaded adapter."""

    id: int
    path: str


_lora_manager: OnceLock[LoRAManager] = OnceLock()


def get_lora_manager() -> LoRAManager | None:
    """Return the process's manager; None unless `DYN_LORA_ENABLED` is true."""
    is_enabled = _lora_manager.get() is not None or env_bool("DYN_LORA_ENABLED")
    return _lora_manager.get_or_init(LoRAManager) if is_enabled else None
