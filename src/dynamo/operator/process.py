"""The process `python -m dynamo.operator`: its options, and the operator with its webhooks."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from dynamo.core import logging as logs
from dynamo.core.config import load, option, setting
from dynamo.core.errors import ConfigError
from dynamo.core.listening import bind
from dynamo.core.metrics import MetricsRegistry
from dynamo.k8s.client import KubeClient
from dynamo.k8s.leader import LeaderElection, LeaseName, process_identity
from dynamo.operator.definitions import prepare_definitions
from dynamo.operator.manager import COMPONENT, Operator
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.webhooks import WebhookServer, WebhookSettings, remove_webhooks
from dynamo.runtime.run_service import run_service

LEASE = "dynamo-operator-lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """Kubernetes operator: makes the cluster match the resources of group nvidia.com."""

    COMMON: ClassVar = ("--namespace", "--leader-elect", "--webhooks", "--port")
    namespace: str = option("", "--namespace", None, "Reconcile this namespace only; default: all")
    operator_namespace: str = option(
        "", "--operator-namespace", "POD_NAMESPACE", "Namespace of the Lease and the certificates; default: of the pod"
    )
    workers: int = option(4, "--workers", None, "Objects of one kind that are reconciled at the same time")
    host: str = option("0.0.0.0", "--host", None, "Address of the health server")  # noqa: S104 - probes come from the node
    port: int = option(8081, "--port", None, "Port of /healthz, /readyz and /metrics; 0: any")
    leader_elect: bool = option(True, "--leader-elect", None, "Only the holder of a Lease reconciles")
    webhooks: bool | None = option(
        None,
        "--webhooks",
        None,
        "Serve and install the admission and conversion webhooks; default: in a pod, where their service reaches them",
    )
    upgrade_crds: bool = option(
        False, "--upgrade-crds", None, "Install the resource definitions that are missing or of an earlier release"
    )
    remove_webhooks: bool = option(
        False,
        "--remove-webhooks",
        None,
        "Remove the webhooks from the cluster and exit, before the operator is uninstalled",
    )
    webhook_port: int = option(9443, "--webhook-port", None, "Port of the webhooks; 0: any")
    discovery_backend: str = option(
        "kubernetes", "--discovery-backend", None, "Discovery of the graphs' processes", choices=("kubernetes", "etcd")
    )
    nats_address: str = option("", "--nats-address", None, "NATS server of the graphs' processes")
    etcd_endpoints: str = option("", "--etcd-endpoints", None, "etcd of the graphs' processes")
    model_express_url: str = option("", "--model-express-url", None, "ModelExpress server of the graphs' processes")
    prometheus_endpoint: str = option("", "--prometheus-endpoint", None, "Prometheus server that planners read")

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be at least 1")
        for flag, value in (("--port", self.port), ("--webhook-port", self.webhook_port)):
            if not 0 <= value <= 65535:
                raise ConfigError(f"{flag} {value}: must be 0 to 65535")
        if self.discovery_backend == "etcd" and not self.etcd_endpoints:
            raise ConfigError("--discovery-backend etcd: requires --etcd-endpoints")

    @property
    def serves_webhooks(self) -> bool:
        """Whether the webhooks are served."""
        in_pod = bool(setting("KUBERNETES_SERVICE_HOST", "", str))
        return in_pod if self.webhooks is None else self.webhooks

    @property
    def settings(self) -> OperatorSettings:
        """Services of the cluster that processes use."""
        return OperatorSettings(
            discovery_backend=self.discovery_backend,
            nats_address=self.nats_address,
            etcd_endpoints=self.etcd_endpoints,
            model_express_url=self.model_express_url,
            prometheus_endpoint=self.prometheus_endpoint,
        )


def main() -> int:
    """Run the operator until it is stopped. Raises `ConfigError`."""
    options = load(OperatorOptions, sys.argv[1:], prog="python -m dynamo.operator")
    if options.remove_webhooks:
        asyncio.run(uninstall(options))
        return 0
    return run_service("operator", serve(options))


async def uninstall(options: OperatorOptions) -> None:
    """Remove the webhooks. Raise what the API server refuses."""
    logs.setup(component="operator")
    client = KubeClient()
    try:
        await remove_webhooks(client, webhook_settings(options, options.operator_namespace or client.namespace))
    finally:
        await client.close()


@asynccontextmanager
async def serve(options: OperatorOptions) -> AsyncIterator[None]:
    """Serve health first, then webhooks, then reconcile; stop in the opposite order."""
    async with AsyncExitStack() as stack:
        client = KubeClient()
        stack.push_async_callback(client.close)
        registry = MetricsRegistry()
        home = options.operator_namespace or client.namespace
        election = None
        if options.leader_elect:
            election = LeaderElection(
                client, LeaseName(home, LEASE), process_identity(), on_lost=lambda: os._exit(1)
            )  # A leader that lost its Lease must write nothing more; it starts again as a candidate.
        operator = Operator(
            client,
            options.settings,
            namespace=options.namespace or None,
            optional=None,
            workers=options.workers,
            election=election,
            metrics=registry,
        )
        await operator.http.start(bind(options.host, options.port, "--port"))
        stack.push_async_callback(operator.http.close)
        settings = webhook_settings(options, home)
        await prepare_definitions(client, home, settings.service, upgrades=options.upgrade_crds)
        if options.serves_webhooks:
            webhooks = WebhookServer(client, settings, registry)
            await webhooks.start(bind(options.host, options.webhook_port, "--webhook-port"))
            stack.push_async_callback(webhooks.close)
        operator.start()
        stack.push_async_callback(operator.close)
        yield


def webhook_settings(options: OperatorOptions, home: str) -> WebhookSettings:
    """Return the settings of the webhooks; requests of the operator's own account are those of the operator."""
    account = setting("POD_SERVICE_ACCOUNT", COMPONENT, str)
    return WebhookSettings(
        namespace=home,
        operator_users=frozenset({f"system:serviceaccount:{home}:{account}"}),
        namespaces=(options.namespace,) if options.namespace else (),
    )
