"""Regions, runs and descriptors, without anything that moves them."""

import time
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kvbm.transfer.base import (
    Deadline,
    Descriptor,
    Layout,
    LayoutMismatch,
    Region,
    TransferAborted,
    TransferError,
    TransferOffer,
    TransferTimeout,
    pair_runs,
    runs,
)

LAYOUT = Layout(model="m", dtype="float32", item_bytes=4, block_tokens=2, layers=2, kv_heads=1, head_dim=3)
DESCRIPTOR = Descriptor(
    engine_id="e", transfer_id="t", layout=LAYOUT, blocks=[1, 2], expires_at=1.0, offers=[TransferOffer(transport="tcp", address="h:1")]
)  # fmt: skip


@given(st.lists(st.integers(0, 12), unique=True))
def test_transfer_runs_list_blocks_in_order(blocks: list[int]) -> None:
    found = list(runs(blocks))
    assert [block for first, end in found for block in range(first, end)] == blocks
    assert all(end != first for (_, end), (first, _) in pairwise(found))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_transfer_pair_runs_list_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    found = [(theirs + at, ours + at) for theirs, ours, count in pair_runs(pairs) for at in range(count)]
    assert found == pairs


@given(st.permutations(range(6)), st.integers(0, 6))
def test_transfer_pieces_are_block_bytes_by_plane(order: list[int], count: int) -> None:
    region = Region(LAYOUT, np.arange(6 * LAYOUT.block_bytes, dtype=np.uint8))
    blocks = order[:count]
    assert b"".join(region.pieces(blocks)) == region.pages[:, blocks].tobytes()


def test_transfer_copy_writes_only_its_target() -> None:
    source = Region(LAYOUT, np.arange(3 * LAYOUT.block_bytes, dtype=np.uint8))
    region = Region(LAYOUT, np.zeros(5 * LAYOUT.block_bytes, np.uint8))
    region.copy(source, [(2, 0), (0, 3), (1, 4)])
    assert (region.pages[:, [0, 3, 4]] == source.pages[:, [2, 0, 1]]).all()
    assert not region.pages[:, [1, 2]].any()


def test_transfer_region_reflects_engine_writes() -> None:
    pages = np.zeros((2, 2, 3 * 2, 3), np.float32)  # layers, keys and values of a head, slots, head_dim
    region = Region(LAYOUT, pages)
    pages[1, 0, 2:4] = 1.0
    assert region.blocks == 3
    assert region.pages[2, 1].view(np.float32).tolist() == [1.0] * 6
    assert not region.pages[:, [0, 2]].any()


@pytest.mark.parametrize(("field", "other"), [("model", "n"), ("dtype", "int8"), ("block_tokens", 4), ("head_dim", 8)])
def test_transfer_error_names_the_layout_difference(field: str, other: object) -> None:
    with pytest.raises(LayoutMismatch, match=field):
        LAYOUT.check(msgspec.structs.replace(LAYOUT, **{field: other}))
    LAYOUT.check(msgspec.structs.replace(LAYOUT))


@pytest.mark.parametrize("value", [None, 5, {}, {"version": 1}, DESCRIPTOR.to_builtins() | {"version": 2}])
def test_transfer_refuses_an_invalid_descriptor(value: object) -> None:
    with pytest.raises(TransferError):
        Descriptor.read(value)


def test_transfer_ignores_unknown_descriptor_fields() -> None:
    assert Descriptor.read(DESCRIPTOR.to_builtins() | {"colour": "red"}) == DESCRIPTOR


def test_transfer_deadline_is_the_earlier_of_end_and_timeout() -> None:
    assert 0 < Deadline.after(100.0, stall_s=0.5).left() <= 0.5
    assert 0 < Deadline.after(0.5, stall_s=100.0).left() <= 0.5
    with pytest.raises(TransferTimeout):
        Deadline(time.monotonic() - 1).left()
    aborted = Deadline.after(100.0)
    aborted.aborted.set()
    with pytest.raises(TransferAborted):
        aborted.left()
