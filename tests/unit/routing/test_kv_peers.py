from typing import Any

import pytest

from dynamo.protocols.engine import PreprocessedRequest
from dynamo.routing.kv_peers import GAIN_MIN, HINT, hint_of, with_hint

PEERS = {1: "one:1", 2: "two:2", 3: "three:3"}


@pytest.mark.parametrize(
    ("holders", "best"),
    [
        ({}, None),
        ({(2, 0): (GAIN_MIN, 0, 0)}, 2),
        ({(2, 0): (GAIN_MIN - 1, 0, 9)}, None),
        ({(2, 0): (2, GAIN_MIN, 0), (3, 0): (GAIN_MIN, 0, 0)}, 2),
        ({(1, 0): (99, 0, 0)}, None),
        ({(4, 0): (99, 0, 0), (3, 1): (9, 0, 0)}, 3),
    ],
    ids=["none", "one", "too little", "the most", "itself", "no peer"],
)
def test_kv_peer_hint_names_the_worker_with_most_blocks(holders: Any, best: int | None) -> None:
    hint = hint_of(1, 0, holders, PEERS)
    assert (hint and hint["worker_id"]) == best
    if hint is not None:
        assert hint["address"] == PEERS[hint["worker_id"]]


def test_kv_peer_hint_excludes_blocks_the_worker_already_has() -> None:
    assert hint_of(1, 8, {(2, 0): (8 + GAIN_MIN - 1, 0, 0)}, PEERS) is None


def test_kv_peer_hint_replaces_an_earlier_one() -> None:
    request = PreprocessedRequest("m", [1])
    assert with_hint(request, None) is request
    first = with_hint(request, {"blocks": 1})
    assert first.extra_args == {HINT: {"blocks": 1}}
    first.extra_args["other"] = 2
    assert with_hint(first, {"blocks": 3}).extra_args == {HINT: {"blocks": 3}, "other": 2}
    assert with_hint(first, None).extra_args == {"other": 2}
