"""Transfers of embeddings by files, and the ring of receive buffers."""

import itertools
import os
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("pydantic")

from dynamo.common.multimodal import embedding_transfer  # noqa: E402
from dynamo.common.multimodal.embedding_transfer import (  # noqa: E402
    LocalEmbeddingReceiver,
    LocalEmbeddingSender,
    RingBuffer,
    torch_dtype_from_string,
)


async def test_receiver_reads_the_embedding_file_and_deletes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedding_transfer.tempfile, "gettempdir", lambda: str(tmp_path))
    sent = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    request, done = await LocalEmbeddingSender().send_embeddings(sent)
    await done
    assert (request.embeddings_shape, request.embedding_dtype_str) == ([2, 3], "bfloat16")
    receiver = LocalEmbeddingReceiver()
    tensor_id, received = await receiver.receive_embeddings(request)
    assert torch.equal(received, sent)
    receiver.release_tensor(tensor_id)
    receiver.release_tensor(tensor_id)
    assert os.listdir(tmp_path) == []


async def test_file_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedding_transfer.tempfile, "gettempdir", lambda: str(tmp_path))
    request, _ = await LocalEmbeddingSender().send_embeddings(torch.zeros(2))
    with pytest.raises(ValueError, match="expected"):
        await LocalEmbeddingReceiver().receive_embeddings(request.model_copy(update={"embeddings_shape": [3]}))


def test_ring_buffer_regions_never_overlap_and_all_space_is_free_at_the_end() -> None:
    rng, ring = random.Random(1), RingBuffer(32)
    live: dict[int, tuple[int, int]] = {}
    for _ in range(500):
        if live and rng.random() < 0.4:
            buffer_id = rng.choice(list(live))
            ring.release_buffer(buffer_id)
            del live[buffer_id]
            continue
        found, region = ring.get_buffer(rng.randint(1, 32))
        if found is None or region is None:
            continue
        live[found] = (region.storage_offset(), region.storage_offset() + region.numel())
        regions = sorted(live.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(regions))
    for buffer_id in live:
        ring.release_buffer(buffer_id)
    assert ring.get_buffer(33) == (None, None)
    assert ring.get_buffer(32)[0] is not None


def test_unknown_type_is_refused() -> None:
    assert torch_dtype_from_string("torch.float32") is torch_dtype_from_string("float32") is torch.float32
    with pytest.raises(ValueError, match="must be a type of PyTorch"):
        torch_dtype_from_string("nan")
