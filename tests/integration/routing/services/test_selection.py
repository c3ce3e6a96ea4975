"""Selection without a runtime: registration of workers, their events, and requests counted until they end."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.kv_events.test_engine_subscriber import TOKENS, message, stored

from dynamo.core.clock import ManualClock
from dynamo.core.errors import SelectionServiceError
from dynamo.kv_router.tracking import TrackingKey
from dynamo.llm import SelectionCacheConfig, SelectionService
from dynamo.protocols.active_sequences import AddedSequence, PrefillLoadHint

PROMPT = [*TOKENS, 13]
M = {"model_name": "m"}
REQUESTED = {"token_ids": PROMPT, **M}
PLACE = ("m", "default")


def worker(worker_id: int, **more: Any) -> dict[str, Any]:
    port = 40_000 + worker_id
    reported = {"block_size": 4, "endpoint": f"http://w{worker_id}", "kv_events_endpoint": f"tcp://localhost:{port}"}
    return {"worker_id": worker_id, **M, **reported, **more}


class SelectionHarness:
    """Service with a manual clock."""

    def __init__(self, **more: Any) -> None:
        self.clock = ManualClock()
        self.service = SelectionService(clock=self.clock, **more)

    def receive_event(self, *frames: list[bytes], listener: int = 0) -> None:
        for one in frames:
            self.service.models.listeners()[listener].events.process(one)

    async def refused(self, work: Any) -> tuple[str, int]:
        with pytest.raises(SelectionServiceError) as caught:
            await work
        return caught.value.kind, caught.value.status_code

    def load(self, worker_id: int = 1) -> tuple[int, int, int]:
        (model,) = self.service.loads(model_name="m")
        row = next(one for one in model["loads"] if one["worker_id"] == worker_id)
        return row["potential_prefill_tokens"], row["potential_decode_blocks"], row["active_requests"]


@pytest.fixture
async def harness() -> AsyncIterator[SelectionHarness]:
    made = SelectionHarness()
    await made.service.start()
    yield made
    await made.service.close()


async def test_selection_service_schedules_a_worker_once_it_is_fully_described(harness: SelectionHarness) -> None:
    record = await harness.service.upsert_worker({"worker_id": 1})
    assert record["lifecycle"] == "incomplete"
    assert record["not_schedulable_reasons"] == [
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0",
    ]
    assert harness.service.ready()["ready"] is False
    record = await harness.service.upsert_worker(worker(1))
    assert record["lifecycle"] == "schedulable" and "not_schedulable_reasons" not in record
    assert harness.service.ready()["schedulable_workers"] == 1
    two = await harness.service.upsert_worker(worker(2, data_parallel_size=2))
    assert len(two["not_schedulable_reasons"]) == 2  # One address, not two.
    other = await harness.service.upsert_worker(worker(3, block_size=8))
    assert "block_size mismatch" in other["not_schedulable_reasons"][0]
    assert [one["worker_id"] for one in harness.service.list_workers(model_name="m")] == [1, 2, 3]


async def test_selection_service_prefers_the_worker_that_caches_the_prefix(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    await harness.service.upsert_worker(worker(2))
    harness.receive_event(
        message(0, stored([1, 2], None, TOKENS[:8])), message(1, stored([3], 2, TOKENS[8:], medium="CPU")), listener=1
    )
    found = await harness.service.select(REQUESTED)
    assert found == {
        **M,
        "routing_group": "default",
        "worker_id": 2,
        "dp_rank": 0,
        "endpoint": "http://w2",
        "block_size": 4,
        "overlap": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12},
        "effective_prefill_tokens": 2,
        "potential_decode_blocks": 4,
    }
    table = await harness.service.overlap_scores(REQUESTED)
    assert [row["host_pinned_blocks"] for row in table["workers"]] == [0, 3]
    assert harness.load(2) == (0, 0, 0)


async def test_selection_service_reserves_a_selection_once(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    assert (await harness.service.select({**REQUESTED, "selection_id": "s"}))["selection_id"] == "s"
    assert harness.load() == (0, 0, 0)
    reserved = await harness.service.create_reservation({"selection_id": "s", **M})
    assert reserved["worker_id"] == 1
    assert harness.load() == (13, 3, 1)
    assert await harness.refused(harness.service.create_reservation({"selection_id": "s", **M})) == ("not_found", 404)
    await harness.service.prefill_complete("s")
    harness.service.add_output_block("s", decay_fraction=1.0)
    assert harness.load() == (0, 4, 1)
    await harness.service.free_reservation("s")
    assert harness.load() == (0, 0, 0)
    for gone in (harness.service.free_reservation("s"), harness.service.prefill_complete("s")):
        assert await harness.refused(gone) == ("not_found", 404)


async def test_selection_service_selects_and_reserves_in_one_call(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    found = await harness.service.select_and_reserve({**REQUESTED, "selection_id": "s"})
    assert (found["isl_tokens"], len(found["sequence_hashes"]), found["track_prefill_tokens"]) == (13, 3, True)
    assert all(-(1 << 63) <= one < 1 << 63 for one in found["sequence_hashes"])
    assert await harness.refused(harness.service.select_and_reserve({**REQUESTED, "selection_id": "s"})) == (
        "conflict",
        409,
    )
    more = await harness.service.select_and_reserve(REQUESTED)
    assert more["selection_id"] != "s"
    assert more["potential_decode_blocks"] == 4  # The prompt's blocks are indexed already; its end is not.
    assert harness.load() == (26, 3, 2)


async def test_selection_service_reserves_a_worker_chosen_by_the_caller(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    hashes = (await harness.service.select_and_reserve({**REQUESTED, "selection_id": "a"}))["sequence_hashes"]
    given = {"selection_id": "b", "worker_id": 1, "sequence_hashes": hashes, "effective_prefill_tokens": 5, **M}
    await harness.service.create_reservation(given)
    assert harness.load() == (18, 3, 2)
    for kind, wrong in (
        ("conflict", given),
        ("not_found", {**given, "selection_id": "c", "worker_id": 9}),
        ("not_found", {**given, "selection_id": "c", "dp_rank": 7}),
        ("invalid_request", {"selection_id": "c", "worker_id": 1, **M}),
    ):
        assert (await harness.refused(harness.service.create_reservation(wrong)))[0] == kind


async def test_selection_service_expires_unused_selections() -> None:
    harness = SelectionHarness(selection_cache=SelectionCacheConfig(ttl_secs=10.0, max_entries=2))
    await harness.service.upsert_worker(worker(1))
    for name in ("a", "b", "c"):
        await harness.service.select({**REQUESTED, "selection_id": name})
    assert (await harness.refused(harness.service.create_reservation({"selection_id": "a", **M})))[0] == "not_found"
    await harness.service.create_reservation({"selection_id": "b", **M})
    harness.clock.advance(11.0)
    assert (await harness.refused(harness.service.create_reservation({"selection_id": "c", **M})))[0] == "not_found"
    harness.clock.advance(300.0)
    assert harness.load() == (0, 0, 0)  # A request without an end message.
    assert (await harness.refused(harness.service.prefill_complete("b")))[0] == "not_found"
    await harness.service.close()


async def test_selection_service_skips_workers_that_are_not_allowed(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    await harness.service.upsert_worker(worker(2, taints=["gold"]))
    golden = {**REQUESTED, "routing_constraints": {"required_taints": ["gold"]}}
    assert (await harness.service.select(golden))["worker_id"] == 2
    assert (await harness.service.select({**REQUESTED, "allowed_worker_ids": [1]}))["worker_id"] == 1
    for kind, wrong in (
        ("not_ready", {**REQUESTED, "allowed_worker_ids": [9]}),
        ("not_ready", {**REQUESTED, "model_name": "n"}),
        ("invalid_request", M),
        ("invalid_request", {**REQUESTED, "routing_constraints": {"required_taints": 7}}),
    ):
        assert (await harness.refused(harness.service.select(wrong)))[0] == kind
    with pytest.raises(ValueError, match="token_ids"):
        await harness.service.select({**REQUESTED, "token_ids": "x"})


async def test_selection_service_drops_reservations_of_a_removed_worker(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    await harness.service.upsert_worker(worker(2))
    await harness.service.select_and_reserve({**REQUESTED, "selection_id": "s", "allowed_worker_ids": [1]})
    changed = await harness.service.update_worker(1, {"taints": ["gold"]})
    assert changed["taints"] == ["gold"]
    assert harness.load() == (13, 3, 1)  # None of its subscribed addresses has changed.
    gone = await harness.service.delete_worker(1)
    assert gone["lifecycle"] == "unschedulable"
    assert (await harness.service.select(REQUESTED))["worker_id"] == 2
    assert (await harness.refused(harness.service.free_reservation("s")))[0] == "not_found"
    assert (await harness.refused(harness.service.delete_worker(1)))[0] == "not_found"
    assert (await harness.refused(harness.service.update_worker(1, {})))[0] == "not_found"


async def test_selection_service_keeps_a_session_on_its_worker() -> None:
    harness = SelectionHarness(session_affinity_ttl_secs=60.0)
    for number in range(1, 6):
        await harness.service.upsert_worker(worker(number))
    requested = {**REQUESTED, "session_id": "chat"}
    first = await harness.service.select_and_reserve(requested)
    for _ in range(4):
        again = await harness.service.select_and_reserve(requested)
        assert again["worker_id"] == first["worker_id"]
    await harness.service.close()


async def test_selection_service_counts_load_of_peers(harness: SelectionHarness) -> None:
    await harness.service.upsert_worker(worker(1))
    mine = await harness.service.select_and_reserve({**REQUESTED, "selection_id": "s"})
    sequence = [one % (1 << 64) for one in mine["sequence_hashes"]]
    added = AddedSequence(sequence, True, None, PrefillLoadHint(7))
    harness.service.replica_added("p/s", (1, 0), PLACE, added)
    assert harness.load() == (20, 3, 2)
    harness.service.replica_prefilled("p/s", PLACE)
    assert harness.load() == (13, 3, 2)
    harness.service.replica_freed("p/s", PLACE)
    assert harness.load() == (13, 3, 1)
    assert (harness.service.block_size(PLACE), harness.service.block_size(("n", "default"))) == (4, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_affinity_ttl_secs": 0.5},
        {"replica_sync_peers": ["tcp://a:1"]},
        {"indexer_peers": ["bogus"]},
    ],
)
async def test_selection_service_error_names_invalid_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "indexer_peers" not in wrong else "bogus"):
        SelectionService(**wrong)


async def test_selection_service_follows_sessions_bound_by_a_peer() -> None:
    harness = SelectionHarness(session_affinity_ttl_secs=60.0)
    for number in range(1, 6):
        await harness.service.upsert_worker(worker(number))
    for number in range(1, 6):
        harness.service.replica_bound(f"chat{number}", (number, 0), PLACE, (number, 7))
        requested = await harness.service.select({**REQUESTED, "session_id": f"chat{number}"})
        assert requested["worker_id"] == number
    harness.service.replica_bound("chat", (1, 0), ("n", "default"), (9, 7))
    await harness.service.close()


async def test_selection_service_tracks_requests_by_keyed_hashes() -> None:
    key = TrackingKey("2026", bytes(32))
    harness, public = SelectionHarness(tracking_key=key), SelectionHarness()
    for one in (harness, public):
        await one.service.upsert_worker(worker(1))

    keyed = await harness.service.select_and_reserve({**REQUESTED, "selection_id": "a"})
    again = await harness.service.select_and_reserve({**REQUESTED, "selection_id": "b"})
    known = await public.service.select_and_reserve({**REQUESTED, "selection_id": "a"})

    assert keyed["sequence_hashes"] == again["sequence_hashes"] != known["sequence_hashes"]
    assert harness.load()[1:] == (public.load()[1], 2), "alike prompts share their blocks"
    hashed = {name: value for name, value in REQUESTED.items() if name != "token_ids"} | {"block_hashes": [1, 2]}
    assert (await harness.refused(harness.service.select(hashed)))[0] == "invalid_request"
    await harness.service.close()
    await public.service.close()


async def test_selection_service_treats_locations_as_taints() -> None:
    harness = SelectionHarness()
    for number, zone in ((1, "a"), (2, "b")):
        await harness.service.upsert_worker({**worker(number), "topology_domains": {"zone": zone}})
    wanted = {"required_taints": ["dynamo.topology/zone=b"], "preferred_taints": {}}

    found = await harness.service.select({**REQUESTED, "routing_constraints": wanted})

    assert found["worker_id"] == 2
    await harness.service.close()
