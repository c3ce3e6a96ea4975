"""Embeddings and processed media that one connector offers and another one reads by NIXL."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.reference

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")
pytest.importorskip("pydantic")

from dynamo.common.multimodal import NixlReadEmbeddingReceiver, NixlReadEmbeddingSender  # noqa: E402
from dynamo.common.multimodal import mm_kwargs_transfer as transfer  # noqa: E402


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
