"""Transfers of embeddings from encode workers by local files or NIXL reads; `nixl_write` has those by NIXL writes."""

import asyncio
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from dynamo.common.constants import EmbeddingTransferMode
from dynamo.common.multimodal.embedding_base import (
    AbstractEmbeddingReceiver,
    AbstractEmbeddingSender,
    MonolithicCounter,
    Tensor,
    TransferRequest,
    torch_dtype_from_string,
    torch_dtype_to_string,
)
from dynamo.common.multimodal.nixl_write import (
    NixlTransferRequest,
    NixlWriteEmbeddingReceiver,
    NixlWriteEmbeddingSender,
)
from dynamo.common.multimodal.ring_buffer import RingBuffer

__all__ = [
    "EMBEDDING_RECEIVER_FACTORIES",
    "EMBEDDING_SENDER_FACTORIES",
    "AbstractEmbeddingReceiver",
    "AbstractEmbeddingSender",
    "LocalEmbeddingReceiver",
    "LocalEmbeddingSender",
    "MonolithicCounter",
    "NixlReadEmbeddingReceiver",
    "NixlReadEmbeddingSender",
    "NixlTransferRequest",
    "NixlWriteEmbeddingReceiver",
    "NixlWriteEmbeddingSender",
    "RingBuffer",
    "TransferRequest",
    "torch_dtype_from_string",
    "torch_dtype_to_string",
]


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
    EmbeddingTransferMode.NIXL_WRITE: NixlWriteEmbeddingSender,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingSender,
}

EMBEDDING_RECEIVER_FACTORIES: dict[EmbeddingTransferMode, Callable[[], AbstractEmbeddingReceiver]] = {
    EmbeddingTransferMode.LOCAL: LocalEmbeddingReceiver,
    EmbeddingTransferMode.NIXL_WRITE: NixlWriteEmbeddingReceiver,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingReceiver,
}
