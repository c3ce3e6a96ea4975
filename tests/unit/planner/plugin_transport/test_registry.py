"""Plugin registry: authentication, versions, and heartbeats that stop."""

from typing import Any

import pytest

from dynamo.planner.config.planner_config import parse
from dynamo.planner.plugin_transport.registry import PluginRegistry
from dynamo.planner.plugins.types import RegisterRequest

AUTH = {"trusted_sources": ["static_secret"], "static_secrets": {"secret-a": "team-a", "secret-b": "team-b"}}


def registry(**registration: Any) -> PluginRegistry:
    config = parse({"plugin_registration": {"auth": AUTH, **registration}})
    return PluginRegistry(config, lambda plugin_id, endpoint: None)


def request(plugin_id: str = "p", **changes: Any) -> RegisterRequest:
    fields = {"plugin_type": "propose", "endpoint": "grpc://h:1", "protocol_version": "1.0", "auth_token": "secret-a"}
    return RegisterRequest(plugin_id=plugin_id, **{**fields, **changes})


def test_plugin_with_a_trusted_secret_is_registered_once() -> None:
    plugins = registry()
    assert plugins.register(request()).accepted
    assert plugins.register(request()).reject_reason == "duplicate_plugin_id: must Unregister before re-Register"
    assert [one.spec.plugin_id for one in plugins.registrations] == ["p"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auth_token": "other"}, "auth_failed"),
        ({"auth_token": ""}, "auth_failed"),
        ({"protocol_version": "1.1"}, "protocol_version_unsupported: requested=1.1, supported=[1.0,1.0]"),
        ({"protocol_version": "new"}, "protocol_version_malformed: requested='new'"),
        ({"observation_window_seconds": 7.0}, "observation_window_misaligned"),
        ({"plugin_type": "observe"}, "plugin_rejected"),
        ({"plugin_id": ""}, "plugin_rejected"),
        ({"plugin_id": "builtin_load_propose"}, "plugin_rejected"),
    ],
)
def test_registration_that_is_refused_names_the_reason(changes: dict[str, Any], reason: str) -> None:
    response = registry().register(request(**changes))
    assert not response.accepted
    assert response.reject_reason.startswith(reason)


def test_registration_without_trusted_sources_is_refused() -> None:
    plugins = registry(auth={})
    assert plugins.register(request()).reject_reason == "auth_failed"


def test_plugin_of_another_caller_cannot_be_removed_and_is_not_distinguished_from_an_unknown_one() -> None:
    plugins = registry()
    plugins.register(request())
    assert plugins.unregister("p", "secret-b") == plugins.unregister("x", "secret-b") == "permission_denied"
    assert plugins.heartbeat("p", "wrong", 0.0) == "auth_failed"
    assert plugins.unregister("p", "secret-a") == ""
    assert "p" not in plugins


def test_plugin_with_missed_heartbeats_is_removed_and_one_without_any_heartbeat_is_kept() -> None:
    plugins = registry(heartbeat_timeout_seconds=15.0, heartbeat_missed_threshold=2)
    plugins.register(request("beats"))
    plugins.register(request("silent"))
    assert plugins.heartbeat("beats", "secret-a", 100.0) == ""
    assert plugins.evict(130.0) == []
    assert plugins.evict(130.1) == ["beats"]
    assert "silent" in plugins
