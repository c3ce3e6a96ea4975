"""Contracts of transfers of embeddings: sender, receiver, and the message between them."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from pydantic import BaseModel

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
