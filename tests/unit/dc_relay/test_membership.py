"""Membership: which endpoints have a pool, and which models are ready."""

from typing import Any

import pytest

from dynamo.dc_relay.membership import (
    CardRecord,
    CardRuntime,
    MembershipFacts,
    Readiness,
    ReadinessEntry,
    RelayCard,
    entries_of,
    plan_of,
)
from dynamo.protocols.discovery import EndpointId

BACKEND, PREFILL = EndpointId("ns", "backend", "generate"), EndpointId("ns", "prefill", "generate")


def card(instance: int = 1, endpoint: EndpointId = BACKEND, **fields: Any) -> CardRecord:
    settings = {"display_name": "m", "source_path": "/m", "kv_cache_block_size": 16, "worker_type": "aggregated"}
    runtime = CardRuntime(total_kv_blocks=100, data_parallel_size=fields.pop("ranks", 1))
    return CardRecord(
        namespace=endpoint.namespace,
        component=endpoint.component,
        endpoint=endpoint.name,
        instance_id=instance,
        card_json=RelayCard(**{**settings, "runtime_config": runtime, **fields}),
    )


def facts(*cards: CardRecord, live: bool = True, sources: bool = True, is_complete: bool = True) -> MembershipFacts:
    """Return cards whose workers are all running and publish events."""
    by_endpoint: dict[EndpointId, list[CardRecord]] = {}
    for record in cards:
        by_endpoint.setdefault(record.endpoint_id, []).append(record)
    ids = {endpoint: frozenset(one.instance_id for one in records) for endpoint, records in by_endpoint.items()}
    ranks = {endpoint: frozenset((one, 0) for one in found) for endpoint, found in ids.items()}
    return MembershipFacts(by_endpoint, ids if live else {}, ranks if sources else {}, is_complete)


def entry(*cards: CardRecord, **settings: bool) -> ReadinessEntry:
    (found,) = entries_of(facts(*cards, **settings), {})
    return found


def test_endpoint_with_an_event_source_has_a_pool_with_all_ranks() -> None:
    plan = plan_of(BACKEND, facts(card(1, ranks=2), card(2)))
    assert plan is not None
    assert plan.ranks == {(1, 0), (1, 1), (2, 0)}
    assert (plan.total_kv_blocks, plan.roles, plan.block_size) == (300, ("aggregated",), 16)
    assert [one.name for one in plan.registrations] == ["m"]


@pytest.mark.parametrize(
    "cards",
    [
        [card(kv_cache_block_size=0)],
        [card(1), card(2, kv_cache_block_size=32)],
        [card(1), card(2, runtime_config=CardRuntime(kv_state_endpoint="ns.other.generate"))],
        [card(runtime_config=CardRuntime(kv_state_endpoint="malformed"))],
    ],
    ids=["no block size", "two block sizes", "two state endpoints", "malformed state endpoint"],
)
def test_endpoint_with_inconsistent_block_formats_has_no_pool(cards: list[CardRecord]) -> None:
    assert plan_of(BACKEND, facts(*cards)) is None


def test_endpoint_without_event_sources_has_no_pool() -> None:
    assert plan_of(BACKEND, facts(card(), sources=False)) is None


def test_pools_of_two_endpoints_of_one_model_share_only_the_block_format() -> None:
    both = facts(card(1), card(2, PREFILL))
    first, second = plan_of(BACKEND, both), plan_of(PREFILL, both)
    assert first is not None
    assert second is not None
    assert first.key.cache_semantics == second.key.cache_semantics
    assert first.key.routing_scope != second.key.routing_scope


def test_aggregated_model_is_ready_with_a_live_worker() -> None:
    assert entry(card()).state is Readiness.READY
    assert entry(card(), live=False).state is Readiness.UNAVAILABLE
    assert entry(card(), is_complete=False).state is Readiness.UNKNOWN


def test_decode_without_its_required_prefill_is_unavailable() -> None:
    decode = card(1, worker_type="decode", needs=[["prefill"]])
    found = entry(decode)
    assert (found.state, found.present_roles, found.missing_roles) == (Readiness.UNAVAILABLE, ("decode",), ("prefill",))
    whole = entry(decode, card(2, PREFILL, worker_type="prefill"))
    assert (whole.state, whole.missing_roles) == (Readiness.READY, ())


def test_role_on_two_endpoints_is_reported_as_duplicate() -> None:
    found = entry(card(1, worker_type="prefill"), card(2, PREFILL, worker_type="prefill"))
    assert found.duplicate_roles == ("prefill",)


def test_card_without_a_role_is_ready_with_any_live_worker() -> None:
    found = entry(card(1, worker_type=None), card(2, PREFILL, worker_type="decode", needs=[["prefill"]]))
    assert (found.state, found.is_legacy) == (Readiness.READY, True)


def test_adapter_is_a_registration_of_its_base_with_separate_readiness() -> None:
    plan = plan_of(BACKEND, facts(card(1), card(1, display_name="a", lora={"name": "a"})))
    assert plan is not None
    assert [(one.name, one.base_model, one.adapter) for one in plan.registrations] == [
        ("m", "m", None),
        ("a", "m", "a"),
    ]
    adapter = card(1, display_name="a", lora={"name": "a"}, worker_type="decode")
    missing = entry(card(1, worker_type="decode"), adapter, card(2, PREFILL, worker_type="prefill"))
    assert [(one.name, one.state, one.missing_roles) for one in missing.adapters] == [
        ("a", Readiness.UNAVAILABLE, ("prefill",))
    ]
