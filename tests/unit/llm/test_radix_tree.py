"""Upstream's face of the index."""

import json
from typing import Any

import pytest

from dynamo.llm import OverlapScores, RadixTree


def event(number: int, data: Any, **more: int) -> bytes:
    return json.dumps({"event_id": number, "data": data, **more}).encode()


def stored(parent: int | None, *pairs: tuple[int, int]) -> dict[str, Any]:
    blocks = [{"block_hash": key, "tokens_hash": tokens, "mm_extra_info": None} for key, tokens in pairs]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def full_tree() -> RadixTree:
    tree = RadixTree()
    tree.apply_event(1, event(1, stored(None, (101, 11), (102, 12), (103, 13))))
    tree.apply_event(2, event(1, stored(None, (201, 11), (202, 12)), dp_rank=1))
    return tree


def test_radix_tree_scores_consecutive_blocks_of_each_rank() -> None:
    found = full_tree().find_matches([11, 12, 13, 14])
    assert found.scores == {(1, 0): 3, (2, 1): 2}
    assert found.frequencies == []
    assert full_tree().find_matches([12]).scores == {}
    assert full_tree().find_matches([]).scores == {}


async def test_scores_may_be_awaited() -> None:
    found = full_tree().find_matches([11], early_exit=True)
    assert isinstance(await found, OverlapScores)
    assert repr(found) == "OverlapScores({(1, 0): 1, (2, 1): 1})"


def test_radix_tree_does_not_score_removed_blocks() -> None:
    tree = full_tree()
    tree.apply_event(1, event(2, {"removed": {"block_hashes": [103]}}))
    assert tree.find_matches([11, 12, 13]).scores == {(1, 0): 2, (2, 1): 2}
    tree.apply_event(2, event(2, "cleared", dp_rank=1))
    assert tree.find_matches([11, 12, 13]).scores == {(1, 0): 2}
    tree.remove_worker(1)
    tree.clear_all_blocks(77)
    assert tree.find_matches([11, 12, 13]).scores == {}


def test_radix_tree_dump_restores_an_equal_tree() -> None:
    tree, again = full_tree(), RadixTree()
    for text in tree.dump_tree_as_events():
        reported = json.loads(text)
        assert set(reported) == {"worker_id", "storage_tier", "residency_domain", "event"}
        again.apply_event(reported["worker_id"], json.dumps(reported["event"]).encode())
    assert again.find_matches([11, 12, 13]).scores == {(1, 0): 3, (2, 1): 2}


def test_unknown_blocks_raise_an_error() -> None:
    tree = full_tree()
    with pytest.raises(RuntimeError, match="parent block"):
        tree.apply_event(1, event(2, stored(999, (104, 14))))
    with pytest.raises(RuntimeError, match="find block"):
        tree.apply_event(1, event(2, {"removed": {"block_hashes": [777]}}))


@pytest.mark.parametrize(
    "text",
    [b"{", b"{}", event(1, {"x": 1}), event(1, "moved"), event(1, stored(None, (-5, 6))), event(1, stored(-1, (1, 1)))],
)
def test_malformed_radix_tree_event_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="deserialize"):
        RadixTree().apply_event(1, text)


def test_radix_tree_event_must_be_bytes() -> None:
    with pytest.raises(TypeError, match="expected bytes, found str"):
        RadixTree().apply_event(1, "{}")  # type: ignore[arg-type]
