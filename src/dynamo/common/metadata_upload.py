"""Upload of an engine's output metadata to a file system, as compressed msgpack."""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dynamo.common.storage import get_fs, upload_to_fs
from dynamo.core.errors import InvalidArgument

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class MetadataUploader:
    """Destination of the metadata of one request."""

    url: str

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.strip():
            raise InvalidArgument(f"metadata_upload.url {self.url!r}: must be the URL of a directory")
        vars(self)["url"] = self.url.strip()  # The class is frozen.

    @classmethod
    def from_settings(cls, settings: dict[str, Any] | None) -> "MetadataUploader | None":
        """Return the destination of `metadata_upload`. Raise `ValueError` if it is not `{"url": …}`."""
        if settings is not None and list(settings) != ["url"]:
            raise InvalidArgument(f"metadata_upload has the keys {sorted(settings)}: expected url")
        return None if settings is None else cls(**settings)

    @classmethod
    def from_backend_request(cls, request: dict[str, Any]) -> "MetadataUploader | None":
        """Return the destination in a request's `nvext`, or in that of its `extra_args`."""
        for place in (request, request.get("extra_args")):
            nvext = place.get("nvext") if isinstance(place, dict) else None
            found = nvext.get("metadata_upload") if isinstance(nvext, dict) else None
            if isinstance(found, dict):
                return cls.from_settings(found)
            if found is not None:
                raise InvalidArgument("metadata_upload must be an object")
        return None

    async def upload_choice(self, choice_index: int, metadata: dict[str, Any]) -> None:
        """Write the metadata of a choice, if it has any."""
        if metadata:
            data = await asyncio.to_thread(_serialize, metadata)
            await upload_to_fs(get_fs(self.url), f"choice_{choice_index}.msgpack.zst", data)


def _serialize(metadata: dict[str, Any]) -> bytes:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError("metadata_upload requires zstandard: pip install zstandard") from None
    raw = msgspec.msgpack.encode({"schema_version": SCHEMA_VERSION, "metadata": _plain(metadata)})
    compressed: bytes = zstandard.ZstdCompressor().compress(raw)
    return compressed


def _plain(value: Any) -> Any:
    """Return a value with arrays and tensors as type, dtype, shape and bytes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    torch = sys.modules.get("torch")  # A tensor exists only where torch is imported.
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return {"type": "tensor", "dtype": name, "shape": list(value.shape), "data": data}
    if isinstance(value, np.ndarray):
        return {"type": "ndarray", "dtype": str(value.dtype), "shape": list(value.shape), "data": value.tobytes()}
    return value
