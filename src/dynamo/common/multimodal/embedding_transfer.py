"""Transfers of embeddings from encode workers by local files or NIXL, and the allocator of receive buffers."""

import asyncio
import itertools
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dynamo.common.constants import EmbeddingTransferMode

Tensor = Any
"""`torch.Tensor`; PyTorch is imported with the first tensor."""


class TransferRequest(BaseModel):  # type: ignore[misc,unused-ignore]
    """The message with which a receiver obtains a tensor."""

    embeddings_shape: list[int]
    embedding_dtype_str: str
    serialized_request: Any


class AbstractEmbeddingSender(ABC):
    """Sender of embeddings."""

    @abstractmethod
    async def send_embeddings(
        self, embeddings: Tensor, stage_embeddings: bool = False
    ) -> tuple[TransferRequest, Awaitable[None]]:
        """Return the message for the receiver, and an awaitable of the end of the transfer.

        With `stage_embeddings` the tensor may be the buffer of the transfer: it must not change before the end.
        """


class AbstractEmbeddingReceiver(ABC):
    """Receiver of embeddings."""

    @abstractmethod
    async def receive_embeddings(self, request: TransferRequest) -> tuple[int, Tensor]:
        """Return the id of a tensor, for `release_tensor`, and the tensor."""

    @abstractmethod
    def release_tensor(self, tensor_id: int) -> None:
        """End the use of a tensor."""


class MonolithicCounter:
    """Ids in ascending order."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def get_next_id(self) -> int:
        """Return the next id."""
        return next(self._ids)


class LocalEmbeddingSender(AbstractEmbeddingSender):
    """Sender by safetensors files in the temporary directory, which the receiver deletes."""

    def __init__(self) -> None:
        self._prefix = f"encoder_cache.{uuid.uuid4().hex}"
        self._counter = MonolithicCounter()

    def save_embeddings_to_file(self, embedding_key: str, embeddings: Tensor) -> str:
        """Write a tensor. Return the path."""
        from safetensors.torch import save_file

        path = Path(tempfile.gettempdir(), f"{self._prefix}.{embedding_key}.safetensors")
        save_file({"ec_cache": embeddings.detach().cpu().contiguous()}, path)
        return str(path)

    async def send_embeddings(
        self, embeddings: Tensor, stage_embeddings: bool = False
    ) -> tuple[TransferRequest, Awaitable[None]]:
        """Write the tensor; the transfer has ended with the return."""
        path = await asyncio.to_thread(self.save_embeddings_to_file, str(self._counter.get_next_id()), embeddings)
        request = TransferRequest(
            embeddings_shape=list(embeddings.shape),
            embedding_dtype_str=torch_dtype_to_string(embeddings.dtype),
            serialized_request=path,
        )
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return request, done


class LocalEmbeddingReceiver(AbstractEmbeddingReceiver):
    """Receiver of the files of `LocalEmbeddingSender`."""

    def __init__(self) -> None:
        self._counter = MonolithicCounter()
        self._files: dict[int, Path] = {}

    async def receive_embeddings(self, request: TransferRequest) -> tuple[int, Tensor]:
        """Return a tensor. Raise `FileNotFoundError`, or `ValueError` if the file has another shape or type."""
        from safetensors.torch import load_file

        path = Path(request.serialized_request)
        tensor = (await asyncio.to_thread(load_file, path))["ec_cache"]
        found = (list(tensor.shape), torch_dtype_to_string(tensor.dtype))
        expected = (request.embeddings_shape, request.embedding_dtype_str)
        if found != expected:
            raise ValueError(f"{path}: shape and type are {found}: expected {expected}")
        tensor_id = self._counter.get_next_id()
        self._files[tensor_id] = path
        return tensor_id, tensor

    def release_tensor(self, tensor_id: int) -> None:
        """Delete the file of a tensor."""
        path = self._files.pop(tensor_id, None)
        if path is not None:
            path.unlink(missing_ok=True)


class NixlReadEmbeddingSender(AbstractEmbeddingSender):
    """Sender whose tensors receivers read by NIXL."""

    def __init__(self) -> None:
        from dynamo import nixl_connect

        self._nixl = nixl_connect
        self.connector = nixl_connect.Connector()

    async def send_embeddings(
        self, embeddings: Tensor, stage_embeddings: bool = False
    ) -> tuple[TransferRequest, Awaitable[None]]:
        """Offer a tensor, or a copy of it. The region is released when it was read."""
        region = embeddings if stage_embeddings else embeddings.detach().clone()
        operation = await self.connector.create_readable(self._nixl.Descriptor(region))
        request = TransferRequest(
            embeddings_shape=list(embeddings.shape),
            embedding_dtype_str=torch_dtype_to_string(embeddings.dtype),
            serialized_request=operation.metadata().model_dump(),
        )
        return request, operation.wait_for_completion()


class NixlReadEmbeddingReceiver(AbstractEmbeddingReceiver):
    """Receiver of tensors of `NixlReadEmbeddingSender`."""

    def __init__(
        self, embedding_hidden_size: int = 8 * 1024, max_item_mm_token: int = 1024, max_items: int = 1024
    ) -> None:
        """The arguments have no effect: each tensor is read into memory of its own size."""
        from dynamo import nixl_connect

        self._nixl = nixl_connect
        self.connector = nixl_connect.Connector()
        self._counter = MonolithicCounter()
        self._used: dict[int, Tensor] = {}

    async def receive_embeddings(self, request: TransferRequest) -> tuple[int, Tensor]:
        """Return a tensor in the memory of the CPU."""
        import torch

        tensor = torch.empty(request.embeddings_shape, dtype=torch_dtype_from_string(request.embedding_dtype_str))
        remote = self._nixl.RdmaMetadata.model_validate(request.serialized_request)
        with await self.connector.begin_read(remote, self._nixl.Descriptor(tensor)) as reading:
            await reading.wait_for_completion()
        tensor_id = self._counter.get_next_id()
        self._used[tensor_id] = tensor
        return tensor_id, tensor

    def release_tensor(self, tensor_id: int) -> None:
        """Release the memory of a tensor."""
        self._used.pop(tensor_id, None)


EMBEDDING_SENDER_FACTORIES: dict[EmbeddingTransferMode, Callable[[], AbstractEmbeddingSender]] = {
    EmbeddingTransferMode.LOCAL: LocalEmbeddingSender,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingSender,
}
"""Senders by transfer; NIXL writes are absent."""

EMBEDDING_RECEIVER_FACTORIES: dict[EmbeddingTransferMode, Callable[[], AbstractEmbeddingReceiver]] = {
    EmbeddingTransferMode.LOCAL: LocalEmbeddingReceiver,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingReceiver,
}
"""Receivers by transfer; NIXL writes are absent."""


class RingBuffer:
    """Allocator of contiguous regions of one tensor, freed in the order of their allocation."""

    BufferId = int

    def __init__(self, buffer_size: int) -> None:
        import torch  # Imported here: workers without embeddings have no PyTorch.

        self.buffer_tensor = torch.zeros(buffer_size, dtype=torch.int8)
        self._size = buffer_size
        self._counter = MonolithicCounter()
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()  # Begin and end, oldest first.
        self._released: set[int] = set()

    def __repr__(self) -> str:
        return f"RingBuffer(size={self._size}, buffers={list(self._live.values())}, released={len(self._released)})"

    def get_buffer(self, size: int) -> tuple[int | None, Tensor | None]:
        """Return the id and the region, of type int8; None for both if no region is free."""
        if size < 1:
            raise ValueError(f"size {size}: must be 1 or more bytes")
        begin = self._free_offset(size)
        if begin is None:
            return None, None
        buffer_id = self._counter.get_next_id()
        self._live[buffer_id] = (begin, begin + size)
        return buffer_id, self.buffer_tensor[begin : begin + size]

    def release_buffer(self, buffer_id: int) -> None:
        """Release a region. It is free once all older ones are released."""
        if buffer_id in self._live:
            self._released.add(buffer_id)
            self._flush_freed_list()

    def _free_offset(self, size: int) -> int | None:
        """Return where a region of this size may begin."""
        if not self._live:
            return 0 if size <= self._size else None
        oldest = next(iter(self._live.values()))[0]
        newest = next(reversed(self._live.values()))[1]
        if newest <= oldest:  # Wrapped: only the gap before the oldest region is free.
            return newest if size <= oldest - newest else None
        if size <= self._size - newest:
            return newest
        return 0 if size <= oldest else None

    def _flush_freed_list(self) -> None:
        while self._live and (oldest := next(iter(self._live))) in self._released:
            self._released.discard(oldest)
            del self._live[oldest]


def torch_dtype_to_string(dtype: Any) -> str:
    """Return the name of a type, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype_from_string(dtype_str: str) -> Any:
    """Return the type of a name, such as `bfloat16` or `torch.bfloat16`. Raise `ValueError` for other names."""
    import torch

    dtype = getattr(torch, dtype_str.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {dtype_str!r}: must be a type of PyTorch such as float32")  # noqa: TRY004 -- an invalid name
    return dtype
