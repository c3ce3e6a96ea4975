"""Health: the response of `/health`."""

import json

import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.runtime.health import SystemHealth


def test_a_process_is_ready_when_its_endpoints_are() -> None:
    health = SystemHealth(variables={})
    assert not health.is_ready()
    health.endpoints["generate"] = True
    assert health.is_ready()
    health.endpoints["clear"] = False
    assert not health.is_ready()


def test_explicit_status_overrides_the_endpoints() -> None:
    health = SystemHealth(variables={})
    health.set(True)
    assert health.is_ready()
    health.endpoints["generate"] = True
    health.set(False)
    assert not health.is_ready()


def test_what_crashed_in_the_background_outweighs_everything() -> None:
    health = SystemHealth(variables={})
    health.set(True)
    health.endpoints["generate"] = True
    is_sound = False
    health.checks.append(lambda: is_sound)
    assert not health.is_sound()
    assert not health.is_ready()
    is_sound = True
    assert health.is_sound()
    assert health.is_ready()


def test_the_status_before_the_first_endpoint_is_a_setting() -> None:
    assert SystemHealth(variables={"DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready"}).is_ready()


def test_the_body_is_upstreams() -> None:
    clock = ManualClock()
    health = SystemHealth(clock, {})
    health.endpoints["generate"] = True
    clock.advance(2.5)
    assert json.loads(health.render()) == {
        "status": "ready",
        "uptime": {"secs": 2, "nanos": 500_000_000},
        "endpoints": {"generate": "ready"},
    }


def test_failed_check_overrides_explicit_status_until_it_passes() -> None:
    health = SystemHealth(variables={})
    health.endpoints["generate"] = True
    health.set(True)
    health.report("generate", is_well=False)
    assert not health.is_ready()
    assert json.loads(health.render())["endpoints"] == {"generate": "notready"}
    health.report("generate", is_well=True)
    assert health.is_ready()


def test_the_endpoints_to_follow_are_a_setting() -> None:
    health = SystemHealth(variables={"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'})
    assert not health.is_ready()
    health.endpoints.update(generate=True, clear=False)
    assert health.is_ready()
    health.endpoints["generate"] = False
    assert not health.is_ready()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_SYSTEM_STARTING_HEALTH_STATUS", "fine"),
        ("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "generate"),
        ("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "[1]"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SystemHealth(variables={name: value})


def test_a_process_of_several_workers_is_as_well_as_each_of_them() -> None:
    first, second = SystemHealth(variables={}), SystemHealth(variables={})
    first.checks.append(second.passes)
    first.set(True)
    second.endpoints["generate"] = True
    assert first.is_ready()
    second.report("generate", is_well=False)
    assert not first.is_ready()
    second.report("generate", is_well=True)
    second.endpoints["generate"] = False  # It leaves in good health.
    assert first.is_ready()
