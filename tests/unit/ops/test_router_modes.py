"""Proof of router modes from observed requests."""

from typing import Any

import pytest

from dynamo.ops.report import CheckStatus, verdict
from dynamo.ops.router_modes import RouterObservation, cached_blocks, rows_of_mode

TWO = frozenset({"1", "2"})


def explanation(worker: int, device: int) -> dict[str, Any]:
    candidates = [{"worker_id": one, "dp_rank": 0, "device": device if one == worker else 0} for one in (1, 2)]
    return {"worker_id": worker, "dp_rank": 0, "candidates": candidates}


KV = RouterObservation(
    workers=TWO, repeated=("1", "1", "1"), explanations=(explanation(1, 0), explanation(1, 9), explanation(1, 9))
)
BUSY = RouterObservation(workers=TWO, unrelated=("1", "1"), held=("1",), meanwhile=("2", "2"))
DIRECT = RouterObservation(workers=TWO, directed={"1": "1", "2": "2"}, undirected_error="no worker")


DRAWN = ("1", "1", "2", "1")
MIXED = {"1": "cpu", "2": "cuda"}
CYCLIC_BUSY = RouterObservation(workers=TWO, unrelated=("1", "2", "1", "2"), held=("1",), meanwhile=("1", "2"))
CYCLIC_IDLE = RouterObservation(workers=TWO, unrelated=("1", "2", "1", "2"), held=("1",), meanwhile=("2", "2"))


@pytest.mark.parametrize(
    ("mode", "seen", "status"),
    [
        ("round-robin", RouterObservation(workers=TWO, unrelated=("1", "2", "1", "2")), CheckStatus.PASS),
        ("round-robin", CYCLIC_BUSY, CheckStatus.PASS),
        ("round-robin", CYCLIC_IDLE, CheckStatus.FAIL),
        ("random", CYCLIC_BUSY, CheckStatus.FAIL),
        (
            "random",
            RouterObservation(workers=TWO, unrelated=DRAWN, held=("1",), meanwhile=("2", "1")),
            CheckStatus.PASS,
        ),
        (
            "random",
            RouterObservation(workers=TWO, unrelated=DRAWN, held=("1",), meanwhile=("2", "2")),
            CheckStatus.FAIL,
        ),
        (
            "power-of-two",
            RouterObservation(workers=TWO, unrelated=DRAWN, held=("1",), meanwhile=("2",)),
            CheckStatus.PASS,
        ),
        (
            "power-of-two",
            RouterObservation(workers=TWO, unrelated=DRAWN, held=("1",), meanwhile=("1",)),
            CheckStatus.FAIL,
        ),
        ("power-of-two", CYCLIC_IDLE, CheckStatus.FAIL),
        (
            "device-aware-weighted",
            RouterObservation(workers=TWO, devices=MIXED, unrelated=("2", "2")),
            CheckStatus.PASS,
        ),
        (
            "device-aware-weighted",
            RouterObservation(workers=TWO, devices=MIXED, unrelated=("2", "1")),
            CheckStatus.FAIL,
        ),
        ("device-aware-weighted", RouterObservation(workers=TWO, devices=MIXED), CheckStatus.FAIL),
        ("round-robin", RouterObservation(workers=TWO, unrelated=("1", "1", "2", "2")), CheckStatus.FAIL),
        ("random", RouterObservation(workers=TWO, unrelated=DRAWN), CheckStatus.PASS),
        ("random", RouterObservation(workers=TWO, unrelated=("1", "1", "1")), CheckStatus.FAIL),
        ("least-loaded", BUSY, CheckStatus.PASS),
        ("least-loaded", RouterObservation(workers=TWO, held=("1",), meanwhile=("2", "1")), CheckStatus.FAIL),
        (
            "device-aware-weighted",
            RouterObservation(workers=TWO | {"3"}, held=("1", "1"), meanwhile=("2",)),
            CheckStatus.FAIL,
        ),
        ("least-loaded", RouterObservation(workers=TWO), CheckStatus.PASS),
        ("kv", KV, CheckStatus.PASS),
        ("kv", RouterObservation(workers=TWO, repeated=("1", "2")), CheckStatus.FAIL),
        ("kv", RouterObservation(workers=TWO, repeated=("1", "1"), explanations=({}, {})), CheckStatus.FAIL),
        (
            "kv",
            RouterObservation(workers=TWO, repeated=("1", "1"), explanations=(explanation(1, 0), explanation(1, 0))),
            CheckStatus.FAIL,
        ),
        ("direct", DIRECT, CheckStatus.PASS),
        ("direct", RouterObservation(workers=TWO, directed={"1": "2"}, undirected_error="x"), CheckStatus.FAIL),
        ("direct", RouterObservation(workers=TWO, directed={"1": "1"}), CheckStatus.FAIL),
        ("kv", RouterObservation(workers=frozenset()), CheckStatus.FAIL),
        ("kv", RouterObservation(workers=frozenset({"1"})), CheckStatus.WARN),
    ],
)
def test_requests_prove_or_contradict_a_mode(mode: str, seen: RouterObservation, status: CheckStatus) -> None:
    rows = rows_of_mode(mode, seen)
    assert verdict(rows) is status, rows
    assert all(row.remedy for row in rows if row.status in {CheckStatus.FAIL, CheckStatus.WARN})


def test_load_without_requests_proves_no_router_mode() -> None:
    rows = rows_of_mode("least-loaded", RouterObservation(workers=TWO))
    assert [row.status for row in rows if row.check == "mode"] == [CheckStatus.SKIP]


def test_cached_blocks_are_those_of_the_chosen_worker() -> None:
    assert cached_blocks(explanation(2, 7)) == 7
    assert cached_blocks({}) == 0
