"""Transfers of processed media inputs (vLLM's `MultiModalKwargsItem`) from a frontend to a worker.

    sender.prepare(features) ──▶ extra_args of the request ──▶ receiver.receive(metadata)
    sender.cleanup(items)    ◀── end of the response stream

One item is one blob: a count, and each buffer of vLLM's encoder with its length. It travels in shared memory on one
machine, or by NIXL.
"""

import asyncio
import logging
import os
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dynamo.core.boundaries import Rollback, logged
from dynamo.core.config import setting

logger = logging.getLogger(__name__)

MM_NIXL_CLEANUP_TIMEOUT_S = setting("DYN_MM_NIXL_CLEANUP_TIMEOUT_S", 60.0, float)
"""Maximum time that `cleanup` waits for the worker; memory of a request that was never read is then released."""

ITEM_FIELD = "__pickled_kwargs_item__"
"""Upstream's name of an item on the wire; nothing is pickled."""

SEGMENTS = Path("/dev/shm")  # noqa: S108 -- POSIX shared memory of Linux
"""Where a segment of POSIX shared memory is a file of its name."""

_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


class TensorTransferSpec(BaseModel):  # type: ignore[misc,unused-ignore]
    """One region of memory that a worker reads by NIXL."""

    field_name: str
    shape: list[int]
    dtype_str: str
    serialized_request: Any


class MmKwargsTransferMetadata(BaseModel):  # type: ignore[misc,unused-ignore]
    """Items of a request that are read by NIXL."""

    modality: str
    tensor_specs: list[TensorTransferSpec]
    mm_hashes: list[str]


class MmKwargsShmItem(BaseModel):  # type: ignore[misc,unused-ignore]
    """A segment of shared memory with one item."""

    name: str
    size: int


class MmKwargsShmTransferMetadata(BaseModel):  # type: ignore[misc,unused-ignore]
    """Items of a request that are in shared memory."""

    modality: str
    items: list[MmKwargsShmItem]
    mm_hashes: list[str]


# Blobs


def joined(buffers: Sequence[Any]) -> bytes:
    """Return buffers as one blob."""
    views = [memoryview(one).cast("B") for one in buffers]
    parts: list[Any] = [_COUNT.pack(len(views))]
    for view in views:
        parts += _LENGTH.pack(view.nbytes), view
    return b"".join(parts)


def split(blob: Any) -> list[memoryview]:
    """Return the buffers of a blob, without a copy. Raise `ValueError` for a malformed blob."""
    rest = memoryview(blob).cast("B")
    if rest.nbytes < _COUNT.size:
        raise ValueError(f"blob of {rest.nbytes} bytes: shorter than its count of buffers")
    (count,) = _COUNT.unpack_from(rest)
    rest = rest[_COUNT.size :]
    found: list[memoryview] = []
    while len(found) < count:
        if rest.nbytes < _LENGTH.size:
            raise ValueError(f"blob ends before buffer {len(found)} of {count}")
        (length,) = _LENGTH.unpack_from(rest)
        rest = rest[_LENGTH.size :]
        if length > rest.nbytes:
            raise ValueError(f"buffer {len(found)} of {length} bytes: only {rest.nbytes} are left")
        found.append(rest[:length])
        rest = rest[length:]
    if rest.nbytes:
        raise ValueError(f"{rest.nbytes} bytes after the last of {count} buffers")
    return found


def encode_mm_kwargs_item(obj: Any) -> bytes:
    """Return a `MultiModalKwargsItem` as a blob. Requires vLLM."""
    from vllm.v1.serial_utils import MsgpackEncoder

    return joined(MsgpackEncoder().encode(obj))


def decode_mm_kwargs_item(blob: Any) -> Any:
    """Return the `MultiModalKwargsItem` of a blob. Requires vLLM.

    Raise `ValueError` for an extension other than a raw view: others of vLLM's would be unpickled if
    `VLLM_ALLOW_INSECURE_SERIALIZATION` is set.
    """
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1 import serial_utils

    class TensorsOnly(serial_utils.MsgpackDecoder):  # type: ignore[misc,name-defined,unused-ignore]
        """Decoder that accepts raw views only."""

        def ext_hook(self, code: int, data: memoryview) -> Any:
            if code != serial_utils.CUSTOM_TYPE_RAW_VIEW:
                raise ValueError(f"msgpack extension {code}: not accepted")
            return data

    return TensorsOnly(MultiModalKwargsItem).decode(split(blob))


# Senders


class MmKwargsSender(ABC):
    """Sender of a request's items."""

    async def prepare(self, mm_features: list[Any], modality: str = "image") -> tuple[dict[str, Any] | None, list[Any]]:
        """Offer the items of vLLM's features; features without data are cached by the worker.

        Return the request's additional `extra_args`, None without an item, and what `cleanup` releases.
        """
        if not self._is_available():
            return None, []
        offered: list[Any] = []
        held: list[Any] = []
        with Rollback(lambda: self._release(held)):
            for number, feature in enumerate(mm_features):
                if feature.data is not None:
                    item, resource = await self._encode_item(number, encode_mm_kwargs_item(feature.data))
                    offered.append(item)
                    held.append(resource)
        hashes = [feature.mm_hash for feature in mm_features if feature.mm_hash]
        return (self._assemble_extra_args(modality, offered, hashes), held) if offered else (None, [])

    def _is_available(self) -> bool:
        return True

    @abstractmethod
    async def _encode_item(self, idx: int, serialized: bytes) -> tuple[Any, Any]:
        """Return the description of an offered blob, and the resource to release."""

    @abstractmethod
    def _assemble_extra_args(self, modality: str, encoded_items: list[Any], mm_hashes: list[str]) -> dict[str, Any]:
        """Return the request's additional `extra_args`."""

    @abstractmethod
    def _release(self, items: list[Any]) -> None:
        """Release resources; failures are logged."""

    async def cleanup(self, items: list[Any]) -> None:
        """Release the resources of `prepare` after the response."""
        self._release(items)


class MmKwargsShmSender(MmKwargsSender):
    """Sender by shared memory, for a worker on this machine; without `/dev/shm` it offers nothing."""

    def _is_available(self) -> bool:
        return SEGMENTS.is_dir()

    async def _encode_item(self, idx: int, serialized: bytes) -> tuple[MmKwargsShmItem, Path]:
        segment = SEGMENTS / f"mm_kwargs_{os.getpid()}_{uuid.uuid4().hex[:12]}_{idx}"
        with segment.open("xb") as target:
            os.fchmod(target.fileno(), 0o600)
            target.write(serialized)
        return MmKwargsShmItem(name=segment.name, size=len(serialized)), segment

    def _assemble_extra_args(self, modality: str, encoded_items: list[Any], mm_hashes: list[str]) -> dict[str, Any]:
        found = MmKwargsShmTransferMetadata(modality=modality, items=encoded_items, mm_hashes=mm_hashes)
        return {"mm_kwargs_shm": found.model_dump()}

    def _release(self, items: list[Any]) -> None:
        for segment in items:
            segment.unlink(missing_ok=True)


class MmKwargsNixlSender(MmKwargsSender):
    """Sender by NIXL; without the nixl package it offers nothing."""

    def __init__(self) -> None:
        from dynamo import nixl_connect

        self._nixl = nixl_connect
        self._connector = nixl_connect.Connector()

    def _is_available(self) -> bool:
        try:
            import nixl  # noqa: F401 -- the package exists
        except ImportError:
            logger.warning("processed media are not transferred: NIXL is not installed")
            return False
        return True

    async def _encode_item(self, idx: int, serialized: bytes) -> tuple[TensorTransferSpec, Any]:
        import torch

        region = torch.frombuffer(bytearray(serialized), dtype=torch.uint8)
        operation = await self._connector.create_readable(self._nixl.Descriptor(region))
        spec = TensorTransferSpec(
            field_name=ITEM_FIELD,
            shape=[len(serialized)],
            dtype_str="uint8",
            serialized_request=operation.metadata().model_dump(),
        )
        return spec, operation

    def _assemble_extra_args(self, modality: str, encoded_items: list[Any], mm_hashes: list[str]) -> dict[str, Any]:
        found = MmKwargsTransferMetadata(modality=modality, tensor_specs=encoded_items, mm_hashes=mm_hashes)
        return {"mm_kwargs_nixl": found.model_dump()}

    def _release(self, items: list[Any]) -> None:
        for operation in items:
            with logged(logger, "release of a NIXL region"):
                operation.__exit__(None, None, None)

    async def cleanup(self, items: list[Any]) -> None:
        """Wait for the worker to read, at most `MM_NIXL_CLEANUP_TIMEOUT_S`, and release the regions."""
        waiting = [asyncio.ensure_future(operation.wait_for_completion()) for operation in items]
        try:
            if waiting:
                done, unread = await asyncio.wait(waiting, timeout=MM_NIXL_CLEANUP_TIMEOUT_S)
                failed = [task.exception() for task in done if not task.cancelled() and task.exception() is not None]
                if unread or failed:
                    logger.warning("transfers of media: %d not read, %d failed %s", len(unread), len(failed), failed)
        finally:
            for task in waiting:
                task.cancel()
            self._release(items)


# Receivers


class MmKwargsReceiver(ABC):
    """Receiver of a request's items."""

    async def receive(self, metadata: BaseModel) -> dict[str, Any]:
        """Return lists of writable blobs by field name."""
        return await self._receive(metadata)

    @abstractmethod
    async def _receive(self, metadata: Any) -> dict[str, Any]:
        """Read the items of a request."""


class MmKwargsShmReceiver(MmKwargsReceiver):
    """Receiver from shared memory."""

    async def _receive(self, metadata: MmKwargsShmTransferMetadata) -> dict[str, Any]:
        found = [self._copied(item) for item in metadata.items]
        return {ITEM_FIELD: found} if found else {}

    def _copied(self, item: MmKwargsShmItem) -> bytearray:
        if Path(item.name).name != item.name:
            raise ValueError(f"shared memory {item.name!r}: must be a name without a directory")
        found = bytearray(item.size)
        with (SEGMENTS / item.name).open("rb") as source:
            if source.readinto(found) != item.size:
                raise ValueError(f"shared memory {item.name}: shorter than {item.size} bytes")
        return found


class MmKwargsNixlReceiver(MmKwargsReceiver):
    """Receiver by NIXL."""

    def __init__(self, max_item_bytes: int = 8 * 1024 * 1024, pool_size: int = 16) -> None:
        """`pool_size` has no effect: each item is read into memory of its own size. `max_item_bytes` neither."""
        from dynamo import nixl_connect

        self._nixl = nixl_connect
        self._connector = nixl_connect.Connector()

    async def _receive(self, metadata: MmKwargsTransferMetadata) -> dict[str, Any]:
        read = await asyncio.gather(*(self._read(spec) for spec in metadata.tensor_specs))
        found: dict[str, Any] = {}
        for spec, region in zip(metadata.tensor_specs, read, strict=True):
            if spec.field_name == ITEM_FIELD:
                found.setdefault(ITEM_FIELD, []).append(bytearray(region.numpy()))
            else:
                found[spec.field_name] = region
        return found

    async def _read(self, spec: TensorTransferSpec) -> Any:
        import torch

        region = torch.empty(spec.shape, dtype=torch.uint8).reshape(-1)
        remote = self._nixl.RdmaMetadata.model_validate(spec.serialized_request)
        with await self._connector.begin_read(remote, self._nixl.Descriptor(region)) as reading:
            await reading.wait_for_completion()
        return region
