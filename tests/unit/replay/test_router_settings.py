"""Router settings: accepted ones, and the warnings about the others."""

import dataclasses
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.router_settings import router_settings
from dynamo.routing.python_config import KvRouterConfig


@pytest.mark.parametrize(
    ("given", "is_balanced", "message"),
    [
        ({"speed": 1}, False, "unknown setting speed: expected one of active_decode_blocks_threshold, "),
        ({"prefill_load_scale": 32}, True, "prefill_load_scale 32: has no effect with balanced"),
        ({"replica_sync": True}, False, "replica_sync True: has no effect in a simulation"),
        ({"router_event_threads": 9}, False, "router_event_threads 9: has no effect in a simulation"),
        ({"queue_policy": "wspt"}, False, "queue_policy 'wspt': requires queue_threshold"),
        ({"queue_timeout_s": 9}, False, "queue_timeout_s 9: requires queue_threshold"),
        ({"queue_timeout_s": 0}, True, "queue_timeout_s must be more than 0"),
        ({"predicted_ttl_s": 5, "use_kv_events": False}, False, "predicted_ttl_s 5: requires use_kv_events true"),
        ({"approximate_ttl_s": 5}, False, "approximate_ttl_s 5: requires use_kv_events false"),
        ({"prefill_load_scale": -1}, False, "prefill_load_scale: must be at least 0"),
        ({"active_decode_blocks_threshold": 2}, False, "must be between 0 and 1"),
    ],
)
def test_setting_without_effect_is_an_error_that_says_why(
    given: dict[str, Any], is_balanced: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match="--router-config: ") as raised:
        router_settings(given, 16, is_balanced=is_balanced)
    assert message in str(raised.value)


def test_all_settings_of_upstreams_class_are_accepted_at_their_defaults() -> None:
    found = router_settings(dataclasses.asdict(KvRouterConfig(prefill_load_scale=4.0)), 16)
    assert found.config.weights.prefill_load_scale == 4.0
    assert found.config.queue_threshold is None


def test_upstreams_names_and_ours_are_the_same_settings() -> None:
    upstream = router_settings({"router_queue_threshold": 0.5, "router_queue_policy": "wspt"}, 16)
    ours = router_settings({"queue_threshold": 0.5, "queue_policy": "wspt"}, 16)
    assert upstream == ours


def test_balanced_without_its_queue_has_no_timeout_to_set() -> None:
    assert router_settings({"queue_timeout_s": 9}, 16, is_balanced=True).rules.queue_timeout_s == 9
    with pytest.raises(ConfigError, match="requires queue_threshold"):
        router_settings({"queue_timeout_s": 9, "queue_threshold": None}, 16, is_balanced=True)
