"""Transfers of processed media inputs in shared memory, and the form of a blob."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic")

from dynamo.common.multimodal import mm_kwargs_transfer as transfer


def test_split_returns_the_joined_buffers() -> None:
    blob = transfer.joined([b"head", bytearray(b""), memoryview(b"tensor")])
    assert [bytes(one) for one in transfer.split(blob)] == [b"head", b"", b"tensor"]
    assert blob[:12] == b"\3\0\0\0\4\0\0\0\0\0\0\0"


@pytest.mark.parametrize("change", [lambda blob: blob[:3], lambda blob: blob[:-1], lambda blob: blob + b"x"])
def test_malformed_blob_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes|buffer"):
        transfer.split(change(transfer.joined([b"ab", b"cd"])))


async def test_worker_reads_the_items_that_a_frontend_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transfer, "SEGMENTS", tmp_path)
    monkeypatch.setattr(transfer, "encode_mm_kwargs_item", lambda data: data)
    sender = transfer.MmKwargsShmSender()
    features = [SimpleNamespace(mm_hash=f"h{n}", data=data) for n, data in enumerate((b"one", None, b"three"))]
    args, held = await sender.prepare(features)
    assert args is not None
    metadata = transfer.MmKwargsShmTransferMetadata(**args["mm_kwargs_shm"])
    assert metadata.mm_hashes == ["h0", "h1", "h2"]
    received = await transfer.MmKwargsShmReceiver().receive(metadata)
    assert received == {"__pickled_kwargs_item__": [b"one", b"three"]}
    await sender.cleanup(held)
    await sender.cleanup(held)
    with pytest.raises(FileNotFoundError):
        await transfer.MmKwargsShmReceiver().receive(metadata)


@pytest.mark.parametrize(("name", "size"), [("../other", 1), ("short", 3)])
async def test_segment_outside_shared_memory_or_too_short_is_refused(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transfer, "SEGMENTS", tmp_path)
    (tmp_path / "short").write_bytes(b"a")
    item = transfer.MmKwargsShmItem(name=name, size=size)
    metadata = transfer.MmKwargsShmTransferMetadata(modality="image", items=[item], mm_hashes=[])
    with pytest.raises(ValueError, match="shared memory"):
        await transfer.MmKwargsShmReceiver().receive(metadata)


async def test_request_whose_features_are_all_cached_has_no_items() -> None:
    found = await transfer.MmKwargsShmSender().prepare([SimpleNamespace(mm_hash="h", data=None)])
    assert found == (None, [])


async def test_segments_are_removed_if_a_later_item_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []

    def encoded(data: bytes) -> bytes:
        if data == b"bad":
            raise ValueError("bad")
        return data

    class Recording(transfer.MmKwargsShmSender):
        def _release(self, items: list[Any]) -> None:
            released.extend(items)
            super()._release(items)

    monkeypatch.setattr(transfer, "encode_mm_kwargs_item", encoded)
    with pytest.raises(ValueError, match="bad"):
        await Recording().prepare([SimpleNamespace(mm_hash="", data=one) for one in (b"good", b"bad")])
    assert len(released) == 1
    assert not released[0].exists()
