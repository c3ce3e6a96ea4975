"""Health: the response of `/health`."""

import json

import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.runtime.health import SystemHealth


def test_process_is_ready_when_all_endpoints_are_ready() -> None:
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


def test_health_failed_background_check_overrides_ready_endpoints() -> None:
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


def test_health_starting_status_is_read_from_its_variable() -> None:
    assert SystemHealth(variables={"DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready"}).is_ready()


def test_health_body_equals_the_upstream_body() -> None:
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


def test_health_depends_only_on_endpoints_named_by_its_variable() -> None:
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
def test_health_error_names_an_invalid_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SystemHealth(variables={name: value})


def test_health_of_a_process_with_several_workers_requires_every_worker_healthy() -> None:
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
