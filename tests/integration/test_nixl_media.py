"""Embeddings and processed media that one connector offers and another one reads by NIXL."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")
pytest.importorskip("pydantic")

from dynamo.common.multimodal import (  # noqa: E402
    NixlReadEmbeddingReceiver,
    NixlReadEmbeddingSender,
    NixlWriteEmbeddingReceiver,
    NixlWriteEmbeddingSender,
    nixl_write,
)
from dynamo.common.multimodal import mm_kwargs_transfer as transfer  # noqa: E402

BUFFER = 1 << 16


async def test_nixl_transfers_return_the_bytes_and_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    request, done = await NixlReadEmbeddingSender().send_embeddings(sent)
    receiver = NixlReadEmbeddingReceiver(max_items=0)
    tensor_id, received = await receiver.receive_embeddings(request)
    assert torch.equal(received, sent)
    receiver.release_tensor(tensor_id)
    await done
    monkeypatch.setattr(transfer, "encode_mm_kwargs_item", lambda data: data)
    sender = transfer.MmKwargsNixlSender()
    args, held = await sender.prepare([SimpleNamespace(mm_hash="h", data=b"abc")])
    assert args is not None
    metadata = transfer.MmKwargsTransferMetadata(**args["mm_kwargs_nixl"])
    assert await transfer.MmKwargsNixlReceiver(pool_size=0).receive(metadata) == {"__pickled_kwargs_item__": [b"abc"]}
    await sender.cleanup(held)


async def test_concurrent_writes_fill_the_regions_of_their_tensors() -> None:
    """Tensors of several types, together larger than the buffer; one of them is offered twice."""
    sender, receiver = NixlWriteEmbeddingSender(), NixlWriteEmbeddingReceiver(BUFFER)
    types = itertools.cycle((torch.float32, torch.bfloat16, torch.int8))
    tensors = [torch.randn(7, 11 * (number + 1)).to(next(types)) for number in range(40)]
    tensors.append(tensors[0])

    async def transferred(tensor: object) -> bool:
        request, done = await sender.send_embeddings(tensor, stage_embeddings=True)
        tensor_id, received = await receiver.receive_embeddings(request)
        await done
        is_same = torch.equal(received, tensor) and received.dtype == tensor.dtype  # type: ignore[attr-defined]
        receiver.release_tensor(tensor_id)
        return bool(is_same)

    assert all(await asyncio.gather(*map(transferred, tensors)))
    _, received = await receiver.receive_embeddings((await sender.send_embeddings(torch.ones(BUFFER // 4)))[0])
    assert received.sum() == BUFFER // 4, "the whole buffer is free again"


async def test_receiver_refuses_what_does_not_fit_and_gives_up_in_time() -> None:
    sender, receiver = NixlWriteEmbeddingSender(), NixlWriteEmbeddingReceiver(1024)
    request, _ = await sender.send_embeddings(torch.zeros(1025, dtype=torch.int8))
    with pytest.raises(ValueError, match="exceeds the receiver's buffer of 1024 bytes"):
        await receiver.receive_embeddings(request)
    with pytest.raises(ValueError, match="shape and type of the tensor give 4 bytes"):
        await receiver.receive_embeddings(request.model_copy(update={"embeddings_shape": [4]}))
    first, _ = await sender.send_embeddings(torch.ones(256))
    tensor_id, _ = await receiver.receive_embeddings(first)
    second, _ = await sender.send_embeddings(torch.ones(1))
    with pytest.raises(TimeoutError):  # no region is free
        await receiver.receive_embeddings(second, receive_timeout=0.02)
    receiver.release_tensor(tensor_id)
    assert (await receiver.receive_embeddings(second))[1] == 1


async def test_tensor_that_no_receiver_requests_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_write, "CLAIM_TIMEOUT_S", 0.02)
    sender = NixlWriteEmbeddingSender()
    request, done = await sender.send_embeddings(torch.ones(4), stage_embeddings=True)
    with pytest.raises(RuntimeError, match="no receiver requested tensor 0"):
        await done
    monkeypatch.undo()
    monkeypatch.setattr(nixl_write, "ABANDONED_S", 0.02)
    receiver = NixlWriteEmbeddingReceiver(64)
    with pytest.raises(TimeoutError):  # the tensor is no longer on offer
        await receiver.receive_embeddings(request, receive_timeout=0.02)
    again, done = await sender.send_embeddings(torch.ones(4), stage_embeddings=True)
    assert (await receiver.receive_embeddings(again))[1].sum() == 4, "the region is free after a while"
    await done
