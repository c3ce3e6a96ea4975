"""The endpoint picker's process: open the runtime or the pool, serve ext_proc and its health, drain."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.tasks import TaskOwner
from dynamo.epp.addresses import InstanceAddresses, PodAddresses
from dynamo.epp.config import STANDALONE, EppOptions, read
from dynamo.epp.identity import keep_current, tls_of
from dynamo.epp.model_picker import ModelPicker
from dynamo.epp.picker import EndpointPicker
from dynamo.epp.pod_picker import PodPicker
from dynamo.epp.renderer import Renderer
from dynamo.epp.server import EppMetrics, ExtProcServer
from dynamo.k8s.client import KubeClient
from dynamo.routing.services.selection import SelectionService
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.run_service import run_service
from dynamo.runtime.system import SystemServer
from dynamo.serving.metrics import FrontendMetrics, LoopDelay
from dynamo.serving.models import DISCOVERY_WAIT_S, Models

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Maximum time for open requests to end, after which their streams are closed: the pod's grace period is 60 s."""
KUBERNETES = "kubernetes"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker until it is stopped; `argv` defaults to the command line. Raises `ConfigError`."""
    options = read(sys.argv[1:] if argv is None else argv)
    return run_service("epp", serve(options))


@asynccontextmanager
async def serve(options: EppOptions) -> AsyncIterator[None]:
    """Serve; at the end of the block report NOT_SERVING, wait for gateways to notice, and close."""
    tls, identity = tls_of(options) if options.secure_serving else (None, None)
    async with AsyncExitStack() as stack:
        if options.mode == STANDALONE:
            registry, health = MetricsRegistry(), SystemHealth()
            picker: EndpointPicker = await stack.enter_async_context(pods_of(options))
        else:
            runtime = DistributedRuntime.from_options(options)
            stack.push_async_callback(runtime.shutdown, drain_timeout_s=0.0)
            await runtime.connect()
            registry, health = runtime.metrics, runtime.health
            picker = await stack.enter_async_context(models_of(options, runtime))
        server = ExtProcServer(
            picker,
            EppMetrics(registry),
            inflight_max=options.max_inflight_requests,
            body_bytes_max=options.body_bytes,
            body_deadline_s=options.body_deadline_s,
        )
        stack.push_async_callback(server.stop, DRAIN_S)
        if options.metrics_port:
            system = SystemServer(health, registry, {})
            await system.listen(options.host, options.metrics_port)
            stack.push_async_callback(system.close)
        delay = LoopDelay(registry, "dynamo_epp")
        stack.callback(delay.close)
        delay.start()
        health.conditions.append(lambda: picker.is_ready)
        await server.start_health(options.host, options.grpc_health_port)
        await server.start(options.host, options.grpc_port, tls)
        if identity is not None:
            tasks = TaskOwner("endpoint picker's certificate")
            stack.push_async_callback(tasks.cancel_and_wait)
            tasks.supervise(lambda: keep_current(identity), "renewal")
        logger.info(
            "endpoint picker ready: %s, ext_proc %s:%d, health %s:%d",
            options.mode, options.host, server.port, options.host, server.health_port,
        )  # fmt: skip
        yield
        server.drain()
        await asyncio.sleep(options.propagation_s)


@asynccontextmanager
async def models_of(options: EppOptions, runtime: DistributedRuntime) -> AsyncIterator[EndpointPicker]:
    """Return a picker of the runtime's models."""
    metrics = FrontendMetrics(MetricsRegistry())  # Requests are measured where they are served: at the workers.
    models = Models(
        runtime,
        metrics,
        router_mode=RouterMode.KV.value,
        kv_options=options,
        namespace=None if options.namespace_prefix else options.namespace,
        namespace_prefix=options.namespace_prefix,
        thresholds=options.thresholds,
        disaggregation=options,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(models.close)
        if options.discovery_backend == KUBERNETES:
            client = KubeClient()
            stack.push_async_callback(client.close)
            pods = PodAddresses(client, pod_namespace(options), worker_selector(options))
            stack.push_async_callback(pods.close)
            pods.start()
            picker = ModelPicker(models, pods)
        else:
            picker = ModelPicker(
                models,
                InstanceAddresses(
                    lambda: [one for served in models.every_set() for one in served.client.instances()],
                    options.target_port,
                ),
            )
        models.start()
        await models.wait_synced(DISCOVERY_WAIT_S)
        yield picker


def pod_namespace(options: EppOptions) -> str:
    """Return the Kubernetes namespace of the pods. Raises `ConfigError`."""
    if not options.pod_namespace:
        raise ConfigError(
            "--pool-namespace (POD_NAMESPACE): required by --discovery-backend kubernetes; the operator sets it in each pod"
        )
    return options.pod_namespace


def worker_selector(options: EppOptions) -> str:
    """Return the labels of the graph's worker pods; the label has the namespace without a generation's suffix."""
    name = options.namespace_prefix or options.namespace
    own = "nvidia.com/dynamo-component-class=worker"
    return own if not name else f"nvidia.com/dynamo-namespace={name},{own}"


@asynccontextmanager
async def pods_of(options: EppOptions) -> AsyncIterator[EndpointPicker]:
    """Return a picker of an InferencePool's pods."""
    client = KubeClient()
    service = SelectionService(
        replica_sync_port=options.replica_sync_port if options.peer_service else None,
        assume_kv_reuse=True,
    )
    renderer = Renderer(
        options.tokenizer_url or "",
        options.tokenizer_protocol or "",
        options.tokenization_timeout_ms / 1000,
        options.tokenizer_response_bytes,
    )
    picker = PodPicker(options, client, service, renderer)
    try:
        await picker.start()
        yield picker
    finally:
        await picker.close()
        await client.close()
