"""Options of the operator's process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeRefused
from dynamo.operator.optional_kinds import OptionalSettings
from dynamo.operator.process import OperatorOptions, own_user, webhook_settings


def options(*argv: str) -> OperatorOptions:
    return load(OperatorOptions, argv, {})


def test_cluster_services_are_read_into_settings() -> None:
    found = options("--nats-address", "nats://n:4222", "--prometheus-endpoint", "http://p").settings
    assert (found.nats_address, found.prometheus_endpoint) == ("nats://n:4222", "http://p")
    assert found.discovery_backend == "kubernetes"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--port", "70000"], "--port 70000: must be 0 to 65535"),
        (["--discovery-backend", "etcd"], "--discovery-backend etcd: requires --etcd-endpoints"),
        (["--grove-termination-delay", "4 hours"], "--grove-termination-delay 4 hours: must be hours, minutes"),
        (["--gang-scheduler", "other"], "--gang-scheduler"),
    ],
)
def test_invalid_options_are_one_error_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*argv)


def test_namespaced_operator_validates_only_its_objects() -> None:
    found = webhook_settings(options("--namespace", "a"), "home")
    assert (found.namespaces, found.namespace) == (("a",), "home")
    assert webhook_settings(options(), "home").namespaces == ()


def test_requests_of_the_operator_account_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_SERVICE_ACCOUNT", "me")
    assert webhook_settings(options(), "home").operator_users == {"system:serviceaccount:home:me"}
    assert webhook_settings(options(), "home", "admin").operator_users == {"system:serviceaccount:home:me", "admin"}


async def test_operator_user_is_read_from_a_self_subject_review() -> None:
    class Server:
        async def create(self, kind: Any, value: Any) -> Any:
            return {**value, "status": {"userInfo": {"username": "admin"}}}

    class OldServer:
        async def create(self, kind: Any, value: Any) -> Any:
            raise KubeRefused(404, "NotFound", "no such resource")

    assert await own_user(Server()) == "admin"  # type: ignore[arg-type]
    assert await own_user(OldServer()) == ""  # type: ignore[arg-type]


def test_options_select_the_use_of_other_controllers() -> None:
    found = options("--no-grove", "--gang-scheduler", "volcano", "--grove-termination-delay", "30m")
    assert found.optional == OptionalSettings(grove=False, gang_scheduler="volcano")
    assert found.settings.grove_termination_delay == "30m"


@pytest.mark.parametrize(
    ("argv", "host", "expected"),
    [([], "", False), ([], "10.0.0.1", True), (["--no-webhooks"], "10.0.0.1", False), (["--webhooks"], "", True)],
)
def test_webhooks_are_served_in_a_pod_unless_an_option_is_set(
    argv: list[str], host: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert options(*argv).serves_webhooks is expected


UNUSED = (
    "aiohttp", "cryptography", "grpc", "h2", "httpcore", "httpx", "huggingface_hub", "importlib.metadata", "jinja2", "kubernetes",
    "lightkube", "nats", "numpy", "opentelemetry", "pydantic", "requests", "rich", "tokenizers", "transformers", "zipfile", "zmq",
    "dynamo.frontend", "dynamo.http", "dynamo.llm", "dynamo.planner", "dynamo.profiler", "dynamo.routing", "dynamo.runtime.distributed",
    "dynamo.serving", "dynamo.text",
)  # fmt: skip
"""Modules that an operator does not use until it makes certificates or prints an error; each takes megabytes."""


def test_operator_with_a_client_loads_no_module_that_it_does_not_use(tmp_path: Path) -> None:
    kubeconfig = {
        "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    code = f"""
import asyncio, sys, dynamo.operator.process as process
async def main():
    process.Operator(process.KubeClient(), process.OperatorOptions().settings)
asyncio.run(main())
print([name for name in {UNUSED!r} if name in sys.modules], 'dynamo.operator.manager' in sys.modules)
"""
    variables = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout == "[] True\n"
