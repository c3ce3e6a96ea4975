"""The frontend process: open the runtime, watch models, serve HTTP, drain."""

import asyncio
import logging
import re
import resource
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from dynamo.console import routes as console_routes
from dynamo.core import logging as logs
from dynamo.core.codec import json_encode
from dynamo.core.config import dump, environ, setting, without_secrets
from dynamo.core.errors import ConfigError, StartupError
from dynamo.core.hosts import is_loopback
from dynamo.core.interpreter import configure_interpreter
from dynamo.core.listening import bind
from dynamo.core.memory import trim_memory
from dynamo.core.parent import die_with_parent
from dynamo.core.tasks import TaskOwner
from dynamo.frontend.config import FOLDER_VARIABLE, INDEX_VARIABLE, FrontendConfig, api_keys, check_platform, read
from dynamo.frontend.cpu_affinity import warn_if_frontend_cpu_affinity_spans_numa_nodes
from dynamo.http.extensions import load_extensions
from dynamo.http.routes.api_options import MEMORY
from dynamo.http.routes.groups import GROUPS, metrics_group
from dynamo.http.server.cors import Cors
from dynamo.http.server.gate import Gate, KeyMetrics, Keys
from dynamo.http.server.service import FrontendServer, HttpOptions, tls_context, tls_identity
from dynamo.http.server.siblings import Siblings
from dynamo.protocols.discovery import METRICS_SOURCES, MetricsAddress
from dynamo.runtime.discovery.pod_identity import MODE_VARIABLE
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.tcp.common import advertised
from dynamo.serving.metrics import FrontendMetrics, LoopDelay
from dynamo.serving.migration import MigrationPolicy
from dynamo.serving.models import DISCOVERY_WAIT_S, Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.request_trace.wanted import is_trace_wanted
from dynamo.text.request_template import RequestTemplate

if TYPE_CHECKING:
    from dynamo.grpc.service import KserveService
    from dynamo.serving.request_trace.trace import RequestTrace, TraceOptions

logger = logging.getLogger(__name__)

SYNC_VARIABLE = "DYN_ROUTER_REPLICA_SYNC"
PREFIX = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
"""Valid start of a metric's name."""
FRONTEND_FD_LIMIT_TARGET = 8192  # The default of most systems, 1024, is less than the connections of a busy frontend.


def main() -> int:
    """Run the frontend until it is stopped. Raises `ConfigError`."""
    argv = sys.argv[1:]
    config = read(argv)
    logs.setup(component="frontend")
    logs.omit_origins()
    die_with_parent()
    if config.dump_config_to:
        dump(config.shown, config.dump_config_to)
    _raise_fd_limit()
    warn_if_frontend_cpu_affinity_spans_numa_nodes(logger)
    shared_folder = setting(FOLDER_VARIABLE, "", str)
    is_parent = config.http_workers > 1 and not shared_folder
    plan = HttpPlan.of(config, shared_folder)
    if config.http_workers > 1:
        check_platform()
    host = "127.0.0.1" if config.interactive else config.http_host
    if config.kserve_grpc_server:
        listener = bind(host, config.grpc_metrics_port, "--grpc-metrics-port")
    else:
        port = 0 if config.interactive else config.http_port
        listener = bind(host, port, "--http-port", shared=config.http_workers > 1)
    if is_parent:
        from dynamo.frontend.workers import HttpWorkers, command_of

        # A bound socket that does not listen reserves the port for the workers, and fails now if the port is in use.
        command = command_of(without_secrets(FrontendConfig, argv), listener.getsockname()[1])
        return HttpWorkers(command, config.http_workers, drain_s(), worker_variables(config)).run()
    import uvloop

    try:
        return uvloop.run(serve(config, listener, plan))
    except StartupError as error:
        if shared_folder:
            raise ConfigError(
                str(error)
            ) from None  # With this status the parent ends instead of restarting the worker.
        raise


def worker_variables(config: FrontendConfig) -> dict[str, str]:
    """Return variables for the processes of one port: their keys, and that their KV routers exchange placements."""
    own = dict(api_keys(config).variables)
    if config.mode == RouterMode.KV.value and SYNC_VARIABLE not in environ():
        own[SYNC_VARIABLE] = "true"  # The option on the command line, if given, has precedence.
    return own


def keys_of(config: FrontendConfig, shared_folder: str) -> Keys | None:
    """Return the API keys; processes that share a port share their limits. Raises `ConfigError`."""
    given, usage = api_keys(config), None
    if shared_folder and config.api_keys_file is not None:  # Other keys have no limits.
        from dynamo.http.server.shared_usage import SharedUsage

        usage = SharedUsage(shared_folder, setting(INDEX_VARIABLE, 0, int))
    return Keys.of(given.keys, config.api_keys_file, given.admin_keys, usage)


class HttpPlan(Struct, frozen=True):
    """Validated settings of the HTTP service, read before anything is started."""

    tls: ssl.SSLContext | None
    http: HttpOptions
    trace: "TraceOptions | None"

    @classmethod
    def of(cls, config: FrontendConfig, shared_folder: str = "") -> "HttpPlan":
        """Return the plan of a configuration. Raises `ConfigError`."""
        keys = None if config.interactive else keys_of(config, shared_folder)
        template = None if config.request_template is None else RequestTemplate.read(config.request_template)
        if not PREFIX.fullmatch(config.metrics_prefix or "dynamo"):
            raise ConfigError(
                f"--metrics-prefix {config.metrics_prefix}: must consist of letters, digits and underscores"
            )
        apis = config.apis
        if shared_folder and apis.responses_store == MEMORY:
            apis = replace(apis, responses_store=str(Path(shared_folder) / "responses"))  # Readable by all processes.
        siblings = Siblings(shared_folder, setting(INDEX_VARIABLE, 0, int)) if shared_folder else None
        tls = identity = None
        if not config.interactive:
            tls = tls_context(config.tls_cert_path, config.tls_key_path, config.tls_client_ca_cert_path)
        if tls is not None:
            identity = tls_identity(tls, config.tls_cert_path, config.tls_key_path)
        http = HttpOptions(
            cors=Cors.of(config.cors_origins),
            keys=keys,
            metrics_prefix=config.metrics_prefix or "dynamo_frontend",
            apis=apis,
            template=template,
            extensions=load_extensions(config.extensions),
            siblings=siblings,
            identity=identity,
            groups=(*((metrics_group,) if config.kserve_grpc_server else GROUPS), console_routes.add),
        )
        return cls(tls, http, trace_options())


async def serve(config: FrontendConfig, listener: socket.socket, plan: HttpPlan) -> int:
    """Run the service on a bound socket; return the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    runtime = DistributedRuntime.from_options(config)
    metrics = FrontendMetrics(runtime.metrics, plan.http.metrics_prefix, migration_limit=config.migration_limit)
    models = models_of(config, runtime, metrics)
    trace = trace_of(plan, runtime, metrics)
    policy = MigrationPolicy(config.migration_limit, config.migration_max_seq_len)
    pipeline = Pipeline(models, metrics, policy, trace, config.answers)
    service = FrontendServer(pipeline, models, runtime.metrics, runtime.health.is_sound, plan.http)
    kserve = kserve_of(config, plan, pipeline, models, runtime) if config.kserve_grpc_server else None
    if not await connected(runtime, stop):
        return 0
    if trace is not None:
        await trace.start()
    delay = LoopDelay(metrics.registry, metrics.prefix)
    delay.start()
    models.start()
    await models.wait_synced(DISCOVERY_WAIT_S)
    await service.start(listener, plan.tls)
    if kserve is not None:
        await kserve.start()
    configure_interpreter()
    trim_memory()  # The import of modules needs more memory than they keep.
    host, port = listener.getsockname()[:2]
    await publish_metrics_address(config, runtime, host, port, is_tls=plan.tls is not None)
    if config.mode == "kv":
        other = "balanced" if config.router_policy == "dynamo" else "dynamo"
        logger.info("KV router policy: %s; --router-policy %s selects the other one", config.router_policy, other)
    logger.info("frontend ready: %s://%s:%d", "http" if plan.tls is None else "https", host, port)

    if plan.http.keys is None and config.tls_client_ca_cert_path is None and not is_loopback(host):
        logger.warning("%s requires no API key: every host that reaches it can use it; set --api-key", host)

    talking = TaskOwner("interactive")
    if config.interactive:
        from dynamo.http.terminal_chat import converse

        chat = talking.start(converse(f"http://127.0.0.1:{port}", config.model_name), "terminal")
        chat.add_done_callback(lambda _: stop.set())
    await stop.wait()
    delay.close()
    logger.info("draining %d request(s)", pipeline.inflight)
    await asyncio.gather(*(one.stop(drain_s()) for one in (kserve, service) if one is not None))
    if trace is not None:
        await trace.close()
    await talking.cancel_and_wait(1.0)
    await models.close()
    await runtime.shutdown()
    return 0


def trace_options() -> "TraceOptions | None":
    """Return the settings of the request trace; None if tracing is disabled. Raise `ConfigError`."""
    if not is_trace_wanted(environ()):
        return None
    from dynamo.serving.request_trace.trace import TraceOptions

    return TraceOptions.from_environment()


def trace_of(plan: HttpPlan, runtime: DistributedRuntime, metrics: FrontendMetrics) -> "RequestTrace | None":
    """Return the request trace of a plan, not started yet."""
    if plan.trace is None:
        return None
    from dynamo.serving.request_trace.trace import RequestTrace

    return RequestTrace(plan.trace, runtime.metrics, metrics.prefix)


async def publish_metrics_address(
    config: FrontendConfig, runtime: DistributedRuntime, host: str, port: int, *, is_tls: bool
) -> None:
    """Register the address of this frontend's metrics, which a planner reads where there is no Prometheus server.

    A sidecar has no discovery record of its own: that of its pod is the worker's, which it would replace.
    """
    if is_sidecar(config):
        return
    reachable = advertised(host)
    authority = f"[{reachable}]" if ":" in reachable else reachable
    url = f"{'https' if is_tls else 'http'}://{authority}:{port}/metrics"
    address = MetricsAddress("frontend", url, runtime.instance_id, config.namespace or "")
    await runtime.discovery.put(METRICS_SOURCES, address.key, json_encode(address))


def is_sidecar(config: FrontendConfig) -> bool:
    """Return whether this frontend is in the pod of a worker, behind an endpoint picker, and shares its discovery record."""
    is_pod = config.discovery_backend == "kubernetes" and setting(MODE_VARIABLE, "", str) != "container"
    return is_pod and config.mode == RouterMode.DIRECT.value


def models_of(config: FrontendConfig, runtime: DistributedRuntime, metrics: FrontendMetrics) -> Models:
    """Return the models that the configuration selects, not watched yet. Raises `ConfigError`."""
    return Models(
        runtime,
        metrics,
        router_mode=config.mode,
        kv_options=config,
        namespace=config.namespace,
        namespace_prefix=config.namespace_prefix,
        thresholds=config.thresholds,
        tokenizers=config.tokenizers,
        disaggregation=config,
        workers_min=config.min_initial_workers,
    )


def kserve_of(
    config: FrontendConfig, plan: HttpPlan, pipeline: Pipeline, models: Models, runtime: DistributedRuntime
) -> "KserveService":
    """Return the gRPC service (`--kserve-grpc-server`) with its port bound. Raises `ConfigError`."""
    from dynamo.grpc.service import OPEN_PATHS, KserveOptions, KserveService

    gate = None
    if plan.http.keys is not None:
        gate = Gate(OPEN_PATHS, KeyMetrics(runtime.metrics, plan.http.metrics_prefix), keys=plan.http.keys)
    options = KserveOptions(
        host=config.http_host,
        port=config.http_port,
        certificate=config.tls_cert_path,
        key=config.tls_key_path,
        client_ca=config.tls_client_ca_cert_path,
    )
    service = KserveService(pipeline, models, runtime.health.is_sound, options, gate)
    service.bind()
    return service


def drain_s() -> float:
    """Return how long active requests may continue after the stop signal, in seconds."""
    return setting("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", 5.0, float)


async def connected(runtime: DistributedRuntime, stop: asyncio.Event) -> bool:
    """Wait for the discovery service; False if stopped meanwhile. Raises `ConfigError` if it does not respond."""
    connecting = asyncio.create_task(runtime.connect(), name="connect")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            connecting.result()
            return True
        return False
    finally:
        connecting.cancel()
        stopping.cancel()
        if not connecting.done() or connecting.exception() is not None:
            await runtime.shutdown()


def _raise_fd_limit(target: int | None = None) -> None:
    """Raise the soft limit of open files, by default to `DYN_FRONTEND_FD_LIMIT_TARGET`; at most 0 leaves it unchanged."""
    if target is None:
        target = setting("DYN_FRONTEND_FD_LIMIT_TARGET", FRONTEND_FD_LIMIT_TARGET, int)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < target and target > 0:
        limit = target if hard == resource.RLIM_INFINITY else min(target, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (ValueError, OSError) as error:
            logger.warning("DYN_FRONTEND_FD_LIMIT_TARGET=%d: the limit remains %d (%s)", target, soft, error)
