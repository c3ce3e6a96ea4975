"""Transfers of embeddings that the sender writes into the receiver's buffer by NIXL.

The sender registers a tensor and returns a request with its id, its size and the metadata of the sender's agent. The
receiver reserves a region of its buffer and sends the region's address in a notification; the sender writes there, and
the end of the write notifies the receiver. The messages are those of Dynamo 1.6.1.
"""

import asyncio
import base64
import logging
import math
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from dynamo.common.multimodal.embedding_base import (
    AbstractEmbeddingReceiver,
    AbstractEmbeddingSender,
    MonolithicCounter,
    Tensor,
    TransferRequest,
    torch_dtype_from_string,
    torch_dtype_to_string,
)
from dynamo.common.multimodal.ring_buffer import RingBuffer
from dynamo.core.boundaries import ErrorBoundary, Rollback
from dynamo.nixl_connect.connection import nixl_agent

logger = logging.getLogger(__name__)

POLL_S = 0.001  # NIXL has no descriptor to wait on; a write of one image takes about a millisecond.
CLAIM_TIMEOUT_S = 600.0
"""Limit in seconds between a request and its receiver's reply: a request may wait in the queue of its engine."""
ABANDONED_S = 60.0
"""Time in seconds for which a region is kept after its receiver gave up: the sender may still write to it."""
ALIGNMENT = 64
"""Regions begin at a multiple of this number of bytes, so that a region can hold any type."""


class NixlTransferRequest(BaseModel):  # type: ignore[misc,unused-ignore]
    """Sender, id and size of a tensor; `TransferRequest.serialized_request` is its JSON."""

    sender_agent_id: str
    agent_metadata: str | None
    """Metadata of the sender's agent in base64; None if the receiver has them."""
    tensor_id: int
    tensor_size: int
    """Bytes."""


class WriteTarget(msgspec.Struct, frozen=True, array_like=True):
    """Region of the receiver."""

    address: int
    size: int
    """Bytes."""
    device: int
    memory: str
    """`cpu` or `cuda`."""


class WriteOrder(msgspec.Struct, frozen=True, array_like=True):
    """Notification by which a receiver requests the write of a tensor."""

    tensor_id: int
    target: WriteTarget
    receive_id: int
    """Number that notifies the receiver of the end."""
    agent_metadata: bytes = b""


@dataclass(slots=True)
class _Offer:
    """A tensor that waits for its receiver, and then for the end of the write."""

    tensor: Tensor
    done: asyncio.Future[None]
    deadline: float
    handle: Any = None
    """NIXL's handle of the running write."""


class NixlWriteEmbeddingSender(AbstractEmbeddingSender):
    """Sender that writes tensors into the buffers of `NixlWriteEmbeddingReceiver`."""

    def __init__(self) -> None:
        self.sender_id = f"sender_{uuid.uuid4()}"
        self._agent = nixl_agent(self.sender_id)
        self._metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._counter = MonolithicCounter()
        self._offers: dict[int, _Offer] = {}
        self._registered: dict[tuple[int, int, int], tuple[Any, int]] = {}
        """Registered memory and the number of its offers, by address, size and device."""
        self._remotes: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def send_embeddings(
        self, embeddings: Tensor, stage_embeddings: bool = False
    ) -> tuple[TransferRequest, asyncio.Future[None]]:
        """Offer a tensor, or a copy of it, whose end needs no waiting. The future raises `RuntimeError` if a write fails."""
        loop = asyncio.get_running_loop()
        tensor = embeddings.detach().contiguous() if stage_embeddings else embeddings.detach().clone().contiguous()
        sent: asyncio.Future[None] = loop.create_future()
        if not stage_embeddings:
            sent.set_result(None)
        self._register(tensor)
        tensor_id = self._counter.get_next_id()
        self._offers[tensor_id] = _Offer(tensor, sent, loop.time() + CLAIM_TIMEOUT_S)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._write_offers(), name="nixl-embedding-writes")
        details = NixlTransferRequest(
            sender_agent_id=self.sender_id,
            agent_metadata=self._metadata,
            tensor_id=tensor_id,
            tensor_size=tensor.nbytes,
        )
        request = TransferRequest(
            embeddings_shape=list(embeddings.shape),
            embedding_dtype_str=torch_dtype_to_string(embeddings.dtype),
            serialized_request=details.model_dump_json(),
        )
        return request, sent

    async def _write_offers(self) -> None:
        """Write tensors to the receivers that request them; return when no offer is left."""
        while self._offers:
            self._begin_writes()
            now = asyncio.get_running_loop().time()
            for tensor_id, offer in list(self._offers.items()):
                if offer.handle is not None:
                    self._check(tensor_id, offer)
                elif now > offer.deadline:
                    self._end(tensor_id, f"no receiver requested tensor {tensor_id} within {CLAIM_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)

    def _begin_writes(self) -> None:
        for sender, messages in self._agent.get_new_notifs().items():
            name = _text(sender)
            for message in messages:
                try:
                    order = msgspec.msgpack.decode(message, type=WriteOrder)
                except msgspec.DecodeError as error:
                    logger.warning("malformed request for a write from the NIXL agent %s: %s", name, error)
                    continue
                self._begin_write(name, order)

    def _begin_write(self, receiver: str, order: WriteOrder) -> None:
        offer = self._offers.get(order.tensor_id)
        if offer is None or offer.handle is not None:
            logger.warning("the NIXL agent %s requested tensor %d, which is not on offer", receiver, order.tensor_id)
            return
        if order.target.size != offer.tensor.nbytes:
            self._end(
                order.tensor_id, f"the receiver's region has {order.target.size} bytes, not {offer.tensor.nbytes}"
            )
            return
        with ErrorBoundary(
            lambda error: self._end(
                order.tensor_id, f"cannot write tensor {order.tensor_id} to the NIXL agent {receiver}: {error}"
            )
        ):
            if receiver not in self._remotes:
                self._agent.add_remote_agent(order.agent_metadata)
                self._remotes.add(receiver)
            target = (order.target.address, order.target.size, order.target.device)
            offer.handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(offer.tensor),
                self._agent.get_xfer_descs([target], mem_type=order.target.memory),
                receiver,
                str(order.receive_id).encode(),
            )
            self._agent.transfer(offer.handle)

    def _check(self, tensor_id: int, offer: _Offer) -> None:
        state = self._agent.check_xfer_state(offer.handle)
        if state == "DONE":
            self._end(tensor_id)
        elif state == "ERR":
            self._end(tensor_id, f"the write of tensor {tensor_id} failed")

    def _end(self, tensor_id: int, error: str = "") -> None:
        """End an offer, with an error or without, and release its memory."""
        offer = self._offers.pop(tensor_id)
        if offer.handle is not None:
            self._agent.release_xfer_handle(offer.handle)
        self._deregister(offer.tensor)
        if error:
            logger.error("NIXL transfer of embeddings: %s", error)
        if offer.done.done():
            return
        if error:
            offer.done.set_exception(RuntimeError(error))
            offer.done.exception()  # It is logged above, so asyncio need not log that a caller does not wait for it.
        else:
            offer.done.set_result(None)

    def _register(self, tensor: Tensor) -> None:
        key = _region(tensor)
        memory, uses = self._registered.get(key) or (self._agent.register_memory(tensor), 0)
        self._registered[key] = (memory, uses + 1)

    def _deregister(self, tensor: Tensor) -> None:
        key = _region(tensor)
        memory, uses = self._registered.pop(key)
        if uses > 1:
            self._registered[key] = (memory, uses - 1)
        else:
            self._agent.deregister_memory(memory)


class NixlWriteEmbeddingReceiver(AbstractEmbeddingReceiver):
    """Receiver whose buffer `NixlWriteEmbeddingSender` writes to."""

    def __init__(self, buffer_size: int = 2 * 8 * 1024 * 1024 * 256 * 2) -> None:
        """Reserve and register a buffer of that many bytes (default: 8 GiB)."""
        self.receiver_id = f"receiver_{uuid.uuid4()}"
        self._agent = nixl_agent(self.receiver_id)
        self._size = buffer_size
        self._ring = RingBuffer(buffer_size)
        self._memory = self._agent.register_memory(self._ring.buffer_tensor)
        self._metadata = self._agent.get_agent_metadata()
        self._counter = MonolithicCounter()
        self._remotes: set[str] = set()
        self._pending: dict[int, asyncio.Future[None]] = {}
        self._buffers: dict[int, int] = {}
        """Buffer of each received tensor, by its id."""
        self._abandoned: dict[int, tuple[int, float]] = {}
        """Buffer and time of release of the tensors whose receivers gave up, by id."""

    async def receive_embeddings(self, request: TransferRequest, receive_timeout: float = 60) -> tuple[int, Tensor]:
        """Return a tensor in the buffer, valid until `release_tensor`.

        `receive_timeout` limits, in seconds, the wait for a free region and then the wait for the write. Raise
        `TimeoutError` after either, and `ValueError` for a malformed request or a tensor larger than the buffer.
        """
        details = self._checked(request)
        if details.sender_agent_id not in self._remotes:
            if not details.agent_metadata:
                raise ValueError(f"the metadata of the NIXL agent {details.sender_agent_id} are missing")
            self._agent.add_remote_agent(base64.b64decode(details.agent_metadata))
            self._remotes.add(details.sender_agent_id)
        buffer_id, region = await self._region(details.tensor_size, receive_timeout)
        tensor_id = self._counter.get_next_id()
        pending = self._pending[tensor_id] = asyncio.get_running_loop().create_future()
        device = max(region.get_device(), 0)  # -1 on CPUs
        target = WriteTarget(region.data_ptr(), details.tensor_size, device, region.device.type)
        order = WriteOrder(details.tensor_id, target, tensor_id, self._metadata if details.agent_metadata else b"")
        with Rollback(lambda: self._abandon(tensor_id, buffer_id)):  # Also if cancelled.
            self._agent.send_notif(details.sender_agent_id, notif_msg=msgspec.msgpack.encode(order))
            async with asyncio.timeout(receive_timeout):
                while not pending.done():
                    self._collect()
                    await asyncio.sleep(POLL_S)
        del self._pending[tensor_id]
        self._buffers[tensor_id] = buffer_id
        return tensor_id, region.view(torch_dtype_from_string(request.embedding_dtype_str)).view(
            request.embeddings_shape
        )

    def release_tensor(self, tensor_id: int) -> None:
        """Release the region of a tensor."""
        buffer_id = self._buffers.pop(tensor_id, None)
        if buffer_id is not None:
            self._ring.release_buffer(buffer_id)

    def _abandon(self, tensor_id: int, buffer_id: int) -> None:
        """Keep the region of a tensor that is not received: the sender may still write to it."""
        del self._pending[tensor_id]
        self._abandoned[tensor_id] = (buffer_id, asyncio.get_running_loop().time() + ABANDONED_S)

    def _checked(self, request: TransferRequest) -> NixlTransferRequest:
        try:
            details: NixlTransferRequest = NixlTransferRequest.model_validate_json(request.serialized_request)
        except ValidationError as error:
            raise ValueError(f"malformed request for embeddings: {error}") from None
        itemsize = torch_dtype_from_string(request.embedding_dtype_str).itemsize
        size = math.prod(request.embeddings_shape) * itemsize
        if size != details.tensor_size:
            raise ValueError(f"tensor_size {details.tensor_size}: shape and type of the tensor give {size} bytes")
        if _aligned(size) > self._size:
            raise ValueError(f"a tensor of {size} bytes exceeds the receiver's buffer of {self._size} bytes")
        return details

    async def _region(self, size: int, timeout_s: float) -> tuple[int, Tensor]:
        """Return a free region, of this number of bytes. Raise `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while True:
                buffer_id, region = self._ring.get_buffer(_aligned(size))
                if buffer_id is not None and region is not None:
                    return buffer_id, region[:size]
                self._collect()
                await asyncio.sleep(POLL_S)

    def _collect(self) -> None:
        """Note the writes that ended, and release abandoned regions."""
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                tensor_id = int(message) if message.isdigit() else -1
                pending = self._pending.get(tensor_id)
                if pending is not None and not pending.done():
                    pending.set_result(None)
                elif tensor_id in self._abandoned:
                    self._ring.release_buffer(self._abandoned.pop(tensor_id)[0])
        now = asyncio.get_running_loop().time()
        for tensor_id, (buffer_id, deadline) in list(self._abandoned.items()):
            if now > deadline:
                del self._abandoned[tensor_id]
                self._ring.release_buffer(buffer_id)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _region(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.nbytes, tensor.get_device()


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode()
