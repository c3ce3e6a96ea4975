"""Worker catalog: the lifecycle of a registration, and the reasons why a worker is not schedulable."""

from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.routing.services.worker_catalog import (
    Catalog,
    WorkerBody,
    WorkerRecord,
    check_event_endpoints,
    plain,
    read,
)

WORKER = {"endpoint": "dyn://a.b.c", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:5999"}


def record(*, requires_events: bool = True, **changes: Any) -> WorkerRecord:
    return Catalog(requires_events=requires_events).record(1, read({**WORKER, **changes}, WorkerBody))


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, None),
        ({"endpoint": ""}, ["endpoint is required"]),
        ({"block_size": 0}, ["block_size must be greater than 0"]),
        ({"data_parallel_size": 0}, ["data_parallel_size must be greater than 0"]),
        ({"kv_events_endpoint": ""}, ["kv_events endpoint is required for dp_rank 0"]),
        (
            {"data_parallel_size": 2, "kv_events_endpoints": {"4": "tcp://a:1"}, "data_parallel_start_rank": 4},
            ["kv_events endpoint is required for dp_rank 5"],
        ),
        (
            {
                "data_parallel_size": 2,
                "kv_events_endpoints": {0: "tcp://a:1", 1: "tcp://a:2"},
                "replay_endpoint": "tcp://a:3",
            },
            ["replay_endpoint is supported only for data_parallel_size 1"],
        ),
    ],
)
def test_incomplete_registration_lists_its_missing_fields(changes: dict[str, Any], reasons: list[str] | None) -> None:
    shown = plain(record(**changes))
    assert shown["lifecycle"] == ("incomplete" if reasons else "schedulable")
    assert shown.get("not_schedulable_reasons") == reasons


def test_a_catalog_without_events_requires_no_event_endpoint() -> None:
    assert record(requires_events=False, kv_events_endpoint=None).is_schedulable


def test_a_record_keeps_router_hints_and_omits_absent_ones() -> None:
    hints: dict[str, Any] = {
        "router_hint_worker_type": "prefill",
        "router_hint_source_control_endpoints": {"0": "tcp://a:1"},
    }
    shown = plain(record(**hints, taints=["b", "a", "b"]))
    assert shown["router_hint_source_control_endpoints"] == {0: "tcp://a:1"}
    assert shown["taints"] == ["a", "b"]
    assert "kv_event_source_mode" not in shown


def test_an_unknown_transfer_enforcement_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="kv_transfer_enforcement"):
        record(kv_transfer_enforcement="x")


def test_an_unusable_address_is_reported_with_its_worker_and_rank() -> None:
    check_event_endpoints(record(replay_endpoint="tcp://a:1"))
    with pytest.raises(InvalidArgument, match=r"invalid kv_events endpoint for worker 1 dp_rank 0: .*missing scheme"):
        check_event_endpoints(record(kv_events_endpoint="x"))
    with pytest.raises(InvalidArgument, match="invalid replay endpoint for worker 1: "):
        check_event_endpoints(record(replay_endpoint="x"))


def test_the_catalog_counts_schedulable_workers() -> None:
    catalog = Catalog()
    catalog.records = {1: record(), 2: record(endpoint=None)}
    assert catalog.schedulable_count == 1
    assert catalog.shown("default", None) == [catalog.records[1], catalog.records[2]]
    assert catalog.shown("other", None) == []
