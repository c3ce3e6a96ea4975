"""The cases of the scale benchmark measure what they claim to measure."""

import pytest
from benchmarks import scale_cases
from benchmarks.scale import medians, replica_message
from benchmarks.scale_joins import copies
from tools import scale_figures

from dynamo.core.codec import json_decode, json_encode


@pytest.mark.parametrize("policy", ["dynamo", "balanced"])
@pytest.mark.parametrize("workers", [3, 70])
def test_scale_loaded_router_has_two_requests_for_each_worker(workers: int, policy: scale_cases.Policy) -> None:
    loaded = scale_cases.LoadedRouter(workers, policy)
    assert len(loaded.router.active) == 2 * workers
    assert len(loaded.router.ranks) == workers
    loaded.decide(7)
    assert loaded.router.decisions[-1].device_blocks >= scale_cases.COMMON_BLOCKS
    loaded.end(7)
    assert len(loaded.router.active) == 2 * workers
    loaded.router.validate()


def test_scale_index_case_reports_every_figure() -> None:
    found = scale_cases.index(20 * scale_cases.EVENT_WORKERS * scale_cases.EVENT_BLOCKS)
    assert all(value >= 0 for value in found.values())
    assert found["stored_ns"] > 0 < found["removed_ns"]
    assert found["full_collection_ms"] > 0, "a full collection is part of the case"


def test_scale_replica_message_case_applies_the_messages() -> None:
    assert replica_message(4) > 0


def test_scale_copies_of_a_record_have_ids_and_keys_of_their_own() -> None:
    made = copies({"n/c/generate/1f": json_encode({"instance_id": 31, "endpoint": "generate"})}, 256, 2)
    assert [key for key, _ in made] == ["n/c/generate/100", "n/c/generate/101"]
    assert json_decode(made[1][1]) == {"instance_id": 257, "endpoint": "generate"}


def test_scale_medians_are_taken_of_each_figure() -> None:
    assert medians([{"a": 1.0, "b": 9.0}, {"a": 2.0, "b": 7.0}, {"a": 30.0, "b": 8.0}]) == {"a": 2.0, "b": 8.0}


def test_scale_rate_adds_up_over_frontends_until_messages_of_replicas_take_the_time() -> None:
    costs = {"serve": 900.0, "route": 100.0, "replica": 10.0, "events": 5.0}
    assert scale_figures.rate(costs, 1) == pytest.approx(1e6 / 1005)
    assert scale_figures.rate(costs, 1, remote=True) == pytest.approx(1e3)
    assert scale_figures.rate(costs, 4) == pytest.approx(1e6 / (250 + 7.5 + 5))
    assert scale_figures.rate(costs, 10_000, remote=True) < 1e6 / 10


def test_scale_numbers_are_readable() -> None:
    assert [scale_figures.number(value) for value in (0.123, 12.34, 1234.5)] == ["0.12", "12.3", "1,234"]
    assert scale_figures.power(10**7) == "10⁷"
