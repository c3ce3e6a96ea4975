"""The process `python -m dynamo.operator`: its options, and the operator with its webhooks."""

import asyncio
import dataclasses
import logging
import os
import re
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
from dynamo.k8s.client import KubeClient, KubeRefused, KubeUnavailable
from dynamo.k8s.kinds import SELF_REVIEWS
from dynamo.k8s.leader import LeaderElection, LeaseName, process_identity
from dynamo.operator.definitions import prepare_definitions
from dynamo.operator.manager import COMPONENT, Operator
from dynamo.operator.namespace_scope import EveryNamespace, NamespaceScope, OtherNamespaces, OwnedNamespace
from dynamo.operator.optional_kinds import OptionalSettings
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.requests.job import RequestSettings
from dynamo.operator.webhooks import WebhookServer, WebhookSettings, remove_webhooks
from dynamo.runtime.run_service import run_service

logger = logging.getLogger(__name__)

LEASE = "dynamo-operator-lock"
DURATION = r"(\d+h)?(\d+m)?(\d+s)?"


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
        "Serve and install the admission and conversion webhooks; default: in a pod, where their service reaches them, and with --webhook-url",
    )
    webhook_url: str = option(
        "",
        "--webhook-url",
        None,
        "Base URL at which the API server reaches the webhooks of this process, such as https://10.0.0.5:9443; "
        "default: the service dynamo-operator-webhook-service",
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
    profiler_image: str = option(
        "", "--profiler-image", None, "Image of the profiling jobs of deployment requests that name none"
    )
    output_copier_image: str = option(
        "", "--output-copier-image", None, "Image with Python of a profiling job's sidecar; default: of the profiler"
    )
    prometheus_endpoint: str = option("", "--prometheus-endpoint", None, "Prometheus server that planners read")
    grove: bool = option(True, "--grove", None, "Run graphs with Grove where it is installed")
    lws: bool = option(
        True, "--lws", None, "Run components of several nodes as LeaderWorkerSets where these are installed"
    )
    gang_scheduler: str = option(
        "auto",
        "--gang-scheduler",
        None,
        "Scheduler of pods that start together; auto: KAI, else Volcano, where installed",
        choices=("auto", "kai", "volcano", "none"),
    )
    ingress_class: str = option(
        "", "--ingress-controller-class-name", None, "Class of the Ingress of frontends that define none"
    )
    ingress_tls_secret: str = option(
        "", "--ingress-controller-tls-secret-name", None, "Secret with the certificate of these Ingresses"
    )
    ingress_host_suffix: str = option(
        "", "--ingress-host-suffix", None, "Domain of the hosts of these Ingresses, after the name of the graph"
    )
    virtual_service_gateway: str = option(
        "", "--istio-virtual-service-gateway", None, "Istio gateway of the VirtualService of frontends that define none"
    )
    grove_termination_delay: str = option(
        "4h0m0s",
        "--grove-termination-delay",
        None,
        "Time for which a gang of Grove may lack pods before it is ended, such as 30m; empty: Grove's own",
    )

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be at least 1")
        for flag, value in (("--port", self.port), ("--webhook-port", self.webhook_port)):
            if not 0 <= value <= 65535:
                raise ConfigError(f"{flag} {value}: must be 0 to 65535")
        if self.grove_termination_delay and not re.fullmatch(DURATION, self.grove_termination_delay):
            raise ConfigError(
                f"--grove-termination-delay {self.grove_termination_delay}: must be hours, minutes and seconds, such as 4h30m"
            )
        if self.webhook_url and not self.webhook_url.startswith("https://"):
            raise ConfigError(f"--webhook-url {self.webhook_url}: must begin with https://")
        if self.discovery_backend == "etcd" and not self.etcd_endpoints:
            raise ConfigError("--discovery-backend etcd: requires --etcd-endpoints")

    @property
    def serves_webhooks(self) -> bool:
        """Whether the webhooks are served."""
        in_pod = bool(setting("KUBERNETES_SERVICE_HOST", "", str))
        return in_pod or bool(self.webhook_url) if self.webhooks is None else self.webhooks

    @property
    def settings(self) -> OperatorSettings:
        """Services of the cluster that processes use."""
        return OperatorSettings(
            discovery_backend=self.discovery_backend,
            nats_address=self.nats_address,
            etcd_endpoints=self.etcd_endpoints,
            model_express_url=self.model_express_url,
            prometheus_endpoint=self.prometheus_endpoint,
            grove_termination_delay=self.grove_termination_delay,
            ingress_class=self.ingress_class,
            ingress_tls_secret=self.ingress_tls_secret,
            ingress_host_suffix=self.ingress_host_suffix,
            virtual_service_gateway=self.virtual_service_gateway,
        )

    @property
    def requests(self) -> RequestSettings:
        """Settings of profiling jobs."""
        return RequestSettings(
            profiler_image=self.profiler_image, copier_image=self.output_copier_image, operator=self.settings
        )

    @property
    def optional(self) -> OptionalSettings:
        """Use of the kinds of other controllers."""
        return OptionalSettings(grove=self.grove, lws=self.lws, gang_scheduler=self.gang_scheduler)


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
        scope: NamespaceScope = OtherNamespaces(client)
        if options.namespace:
            scope = OwnedNamespace(client, options.namespace, process_identity())
        operator = Operator(
            client,
            options.settings,
            namespace=options.namespace or None,
            requests=options.requests,
            optional=options.optional,
            workers=options.workers,
            election=election,
            scope=scope,
            metrics=registry,
        )
        await operator.http.start(bind(options.host, options.port, "--port"))
        stack.push_async_callback(operator.http.close)
        settings = dataclasses.replace(
            webhook_settings(options, home, await own_user(client), scope), has_grove=operator.has_grove
        )
        await prepare_definitions(client, home, settings.service, upgrades=options.upgrade_crds)
        if options.serves_webhooks:
            webhooks = WebhookServer(client, settings, registry)
            await webhooks.start(bind(options.host, options.webhook_port, "--webhook-port"))
            stack.push_async_callback(webhooks.close)
        operator.start()
        stack.push_async_callback(operator.close)
        yield


async def own_user(client: KubeClient) -> str:
    """Return the name under which this process calls the API server; empty if the server has no such review."""
    try:
        review = await client.create(SELF_REVIEWS, {"apiVersion": SELF_REVIEWS.api_version, "kind": SELF_REVIEWS.kind})
    except (KubeRefused, KubeUnavailable) as error:
        logger.info("the API server does not name the operator's user: %s", error)
        return ""
    return str(((review.get("status") or {}).get("userInfo") or {}).get("username") or "")


def webhook_settings(
    options: OperatorOptions, home: str, user: str = "", scope: NamespaceScope | None = None
) -> WebhookSettings:
    """Return the settings of the webhooks; requests of the operator's own account or `user` are those of the operator."""
    account = setting("POD_SERVICE_ACCOUNT", COMPONENT, str)
    users = {f"system:serviceaccount:{home}:{account}", user} - {""}
    return WebhookSettings(
        namespace=home,
        operator_users=frozenset(users),
        url=options.webhook_url.rstrip("/"),
        namespaces=(options.namespace,) if options.namespace else (),
        # An operator of one namespace receives reviews of that namespace only.
        is_excluded=(EveryNamespace() if options.namespace or scope is None else scope).excludes,
    )
