"""Modes: how settings are shared by the runs of a comparison."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.replay.modes import placement, shared_settings


def test_shared_settings_reach_the_runs_on_which_they_have_an_effect() -> None:
    runs = {"a": ("round_robin", {}), "b": ("kv", {}), "c": ("balanced", {"queue_threshold": 2.0})}
    found = shared_settings({"prefill_load_scale": 32, "router_temperature": 0.2}, runs)
    assert found == {
        "a": {},
        "b": {"prefill_load_scale": 32, "router_temperature": 0.2},
        "c": {"router_temperature": 0.2, "queue_threshold": 2.0},
    }


@pytest.mark.parametrize(
    ("shared", "mode", "own"),
    [
        ({"prefill_load_scale": 32}, "balanced", {}),
        ({}, "balanced", {"prefill_load_scale": 32}),
        ({"queue_threshold": 1}, "round_robin", {}),
        ({}, "preble", {"queue_threshold": 1}),
    ],
)
def test_setting_without_effect_on_any_run_is_an_error(
    shared: dict[str, object], mode: str, own: dict[str, object]
) -> None:
    found = shared_settings(shared, {mode: (mode, own)})
    with pytest.raises(ConfigError, match="--router-config"):
        placement(mode, found[mode], 16, 1)
