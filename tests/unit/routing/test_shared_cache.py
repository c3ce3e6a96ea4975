"""A shared cache: workers publish its address, and it reports its blocks."""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.core.metrics import MetricsRegistry
from dynamo.kv_router.hicache import RUNTIME_KEY, page_names
from dynamo.protocols.model_card import ModelDeploymentCard, RuntimeConfig
from dynamo.routing.metrics import SharedCacheMetrics
from dynamo.routing.shared_cache import SharedCache, agreed_layout

TOKENS = list(range(8))
WORKER = {"dynamo_namespace": "n", "dynamo_component": "c", "worker_id": "1"}


def card(**layout: Any) -> ModelDeploymentCard:
    given = {"backend": "mooncake", "page_size": 4, "is_mla_model": True, **layout}
    return ModelDeploymentCard(
        display_name="m", slug="m", runtime_config=RuntimeConfig(runtime_data={RUNTIME_KEY: given})
    )


def shared() -> SharedCache:
    return SharedCache(4, SharedCacheMetrics(MetricsRegistry(), "router", WORKER), "m")


def message(number: int, *events: Any) -> list[bytes]:
    return [b"", struct.pack(">Q", number), msgspec.msgpack.encode((1_700_000_000_000, list(events), 0))]


def key(place: int) -> str:
    return page_names(TOKENS, 4)[place].hex() + "__k"


def test_shared_cache_is_absent_without_a_store() -> None:
    assert agreed_layout([ModelDeploymentCard(display_name="m", slug="m")], 4) is None


def test_shared_cache_address_is_read_from_any_worker() -> None:
    found = agreed_layout([card(), card(kv_events_endpoint="tcp://store:1")], 4)

    assert found is not None and found.kv_events_endpoint == "tcp://store:1"


@pytest.mark.parametrize(
    ("cards", "expected_message"),
    [
        ([card(), card(tp_size=2)], "different addresses"),
        ([card(kv_events_endpoint="tcp://a:1"), card(kv_events_endpoint="tcp://b:1")], "different addresses"),
        ([card(backend="other")], "other"),
        ([card(page_size=8)], "page size of 8"),
        ([card(page_size=0)], "pages of 0"),
    ],
)
def test_shared_cache_refuses_an_unusable_store(cards: list[ModelDeploymentCard], expected_message: str) -> None:
    with pytest.raises(InvalidArgument, match=expected_message):
        agreed_layout(cards, 4)


def test_shared_cache_errors_do_not_stop_routing(caplog: pytest.LogCaptureFixture) -> None:
    found = shared()

    found.apply_cards([card(page_size=8)])
    found.apply_cards([card(page_size=8)])

    assert found.endpoint is None and found.find(TOKENS) == ()
    assert len([record for record in caplog.records if "ignoring the shared cache" in record.message]) == 1


@pytest.mark.parametrize("by_name", [True, False])
def test_shared_cache_reads_objects_with_named_or_positional_fields(by_name: bool) -> None:
    found = shared()
    found.apply_cards([card()])
    events: list[Any] = [
        {"event_type": "stored", "object_key": key(0), "tenant_id": "default"},
        {"event_type": "stored", "object_key": key(1), "tenant_id": "", "group_id": None},
    ]

    found.apply(message(1, *(events if by_name else [list(one.values()) for one in events])))

    assert found.find(TOKENS) == ((0, 2),)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"1", b"\x93\x00\x90\x00"],
        [b"", struct.pack(">Q", 1), b"\xc1"],
        [b"", struct.pack(">Q", 1), msgspec.msgpack.encode((0, [3], 0))],
        [b"", struct.pack(">Q", 1), msgspec.msgpack.encode((0, [{"object_key": "x"}], 0))],
    ],
)
def test_shared_cache_counts_and_skips_malformed_events(frames: list[bytes]) -> None:
    registry = MetricsRegistry()
    found = SharedCache(4, SharedCacheMetrics(registry, "router", WORKER), "m")
    found.apply_cards([card()])

    found.apply(frames)

    assert 'dynamo_router_shared_cache_errors_total{router_id="router"} 1' in registry.render()


async def publish(store: Any, place: int, numbers: Iterator[int]) -> None:
    await store.send_multipart(message(next(numbers), {"event_type": "stored", "object_key": key(place)}))


def holds(found: Any, place: int) -> bool:
    return bool(found.find(TOKENS) == ((place, place + 1),))
