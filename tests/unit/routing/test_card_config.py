"""RouterConfig: what a worker asks for is what the frontend does, and what it cannot do is told."""

import logging
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.routing.busy import Thresholds
from dynamo.routing.card_config import RouterConfig, WantedRouting, wanted_routing
from dynamo.routing.python_config import KvRouterConfig
from dynamo.runtime.push_router import RouterMode


def card(router_config: Any) -> ModelDeploymentCard:
    return ModelDeploymentCard(display_name="m", slug="m", router_config=router_config)


@pytest.mark.parametrize("mode", list(RouterMode))
def test_what_a_worker_asks_for_is_read_back(mode: RouterMode) -> None:
    config = RouterConfig(mode, active_prefill_tokens_threshold=5)
    assert wanted_routing(card(config.on_card())) == WantedRouting(mode, Thresholds(active_prefill_tokens_threshold=5))
    assert wanted_routing(card(RouterConfig(mode).on_card())) == WantedRouting(mode)
    config = RouterConfig(mode, enforce_disagg=True, session_affinity_ttl_secs=60, session_affinity_mode="soft")
    assert wanted_routing(card(config.on_card())) == WantedRouting(
        mode, enforce_disagg=True, affinity_ttl_s=60, affinity_mode="soft"
    )


def test_a_card_that_asks_for_nothing_gets_the_frontends_own() -> None:
    assert wanted_routing(ModelDeploymentCard(display_name="m", slug="m")) == WantedRouting()


@pytest.mark.parametrize(
    "wanted",
    [
        {"router_mode": "later", "kv_router_config": {"router_temperature": 1.0}},
        {"router_mode": 5},
        {"router_mode": "later", "session_affinity_ttl_secs": 0, "session_affinity_mode": "soft"},
        {"router_mode": "later", "session_affinity_ttl_secs": "x", "enforce_disagg": "yes"},
        {"load_threshold_config": 5},
        {"router_mode": "later", "load_threshold_config": {"active_decode_blocks_threshold": 7.0}},
        {"router_mode": "later", "load_threshold_config": {"active_decode_blocks_threshold": "x"}},
    ],
)
def test_what_is_not_supported_or_wrong_is_told_and_left(wanted: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert wanted_routing(card(wanted)) == WantedRouting()
    assert "model m" in caplog.text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("config", object()),
        ("session_affinity_ttl_secs", 0),
        ("session_affinity_mode", "firm"),
        ("active_decode_blocks_threshold", 2.0),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=argument):
        RouterConfig(RouterMode.Random, **{argument: value})


def test_what_a_kv_router_is_to_weigh_is_read_back() -> None:
    kv = KvRouterConfig(router_temperature=0.5, decode_active_request_weight=2.0, router_queue_threshold=3.0)
    said = RouterConfig(RouterMode.KV, kv).on_card()
    assert said["router_mode"] == "k_v", "as the released system spells it"
    assert wanted_routing(card(said)).kv == kv
    assert "decode_active_request_weight" not in RouterConfig(RouterMode.KV, KvRouterConfig()).on_card()
    assert wanted_routing(card(said | {"router_mode": "random"})).kv is None, "nobody weighs anything there"
    assert wanted_routing(card({"router_mode": "kv"})) == WantedRouting(RouterMode.KV), "as we once said"


@pytest.mark.parametrize(
    "wrong", [{"router_temperature": -1}, {"router_queue_policy": "later"}, {"router_ttl_secs": "x"}, 5]
)
def test_settings_of_a_kv_router_that_cannot_be_are_told_and_left(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = wanted_routing(card({"router_mode": "k_v", "kv_router_config": wrong}))
    assert found == WantedRouting(RouterMode.KV)
    assert "unreadable KV router settings" in caplog.text


def test_a_mode_is_a_mode() -> None:
    with pytest.raises(InvalidArgument, match="mode"):
        RouterConfig("random")  # type: ignore[arg-type]
