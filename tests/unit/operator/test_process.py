"""Options of the operator's process."""

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.operator.namespace_scope import EveryNamespace
from dynamo.operator.process import OperatorOptions, webhook_settings


def options(*argv: str) -> OperatorOptions:
    return load(OperatorOptions, argv, {})


def test_services_of_the_cluster_become_settings() -> None:
    found = options("--nats-address", "nats://n:4222", "--prometheus-endpoint", "http://p").settings
    assert (found.nats_address, found.prometheus_endpoint) == ("nats://n:4222", "http://p")
    assert found.discovery_backend == "kubernetes"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--port", "70000"], "--port 70000: must be 0 to 65535"),
        (["--discovery-backend", "etcd"], "--discovery-backend etcd: requires --etcd-endpoints"),
    ],
)
def test_wrong_options_are_one_clear_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*argv)


def test_an_operator_of_one_namespace_checks_only_its_objects() -> None:
    found = webhook_settings(options("--namespace", "a"), "home", EveryNamespace())
    assert (found.namespaces, found.namespace) == (("a",), "home")
    assert webhook_settings(options(), "home", EveryNamespace()).namespaces == ()


def test_requests_of_the_own_account_are_those_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_SERVICE_ACCOUNT", "me")
    assert webhook_settings(options(), "home", EveryNamespace()).operator_users == {"system:serviceaccount:home:me"}


@pytest.mark.parametrize(
    ("argv", "host", "expected"),
    [([], "", False), ([], "10.0.0.1", True), (["--no-webhooks"], "10.0.0.1", False), (["--webhooks"], "", True)],
)
def test_webhooks_are_served_in_a_pod_unless_an_option_decides(
    argv: list[str], host: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert options(*argv).serves_webhooks is expected
