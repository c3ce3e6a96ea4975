"""Planner process: `python -m dynamo.planner`, and the parts that its settings select."""

import asyncio
import logging
import sys
from contextlib import AsyncExitStack

from dynamo.core import logging as logs
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import load, setting
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.metrics_page import MetricsPage
from dynamo.core.parent import die_with_parent
from dynamo.planner.config.planner_config import PROMETHEUS, DeployEnvironment, PlannerConfig, ScalingPolicy
from dynamo.planner.config.source import load_config
from dynamo.planner.connectors.base import GenerationalConnector, PlannerConnector
from dynamo.planner.connectors.global_planner import GlobalPlannerConnector
from dynamo.planner.connectors.virtual import VirtualConnector
from dynamo.planner.connectors.workers import WorkerDirectory
from dynamo.planner.control_api import HOST as LOOPBACK
from dynamo.planner.control_api import control_routes, serve_optional
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.decision_log import DecisionLog
from dynamo.planner.observation.observer import LiveSteps, Observer, TrafficSource
from dynamo.planner.observation.prometheus import PrometheusTraffic
from dynamo.planner.observation.scrape import FrontendScraper
from dynamo.planner.observation.steps import StepObserver
from dynamo.planner.plugin_metrics import PluginMetrics
from dynamo.planner.precedence import Precedence
from dynamo.planner.reports.recorder import ReportRecorder
from dynamo.planner.service import PlannerParts, PlannerService, TickPlugins
from dynamo.planner.worker_benchmarks import measured_steps
from dynamo.protocols.planner import WorkerCounts
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.json_service import HttpCall, JsonRoutes, TextBody
from dynamo.runtime.run_service import open_runtime, stop_event

logger = logging.getLogger(__name__)

POLL_S = 1.0


def main() -> int:
    """Run the planner until it is stopped. Raises `ConfigError`."""
    logs.setup(component="planner")
    config = load_config(sys.argv[1:])
    die_with_parent()
    import uvloop

    return uvloop.run(_serve(config))


async def _serve(config: PlannerConfig) -> int:
    """Run the planner until a signal. Raises `ConfigError` if it cannot start."""
    stop = stop_event()
    async with open_runtime(load(RuntimeOptions, [])) as runtime:
        running = asyncio.create_task(run_planner(runtime, config), name="planner")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait({running, stopping})
    logger.info("planner stopped; the workers keep running")
    return 0


async def run_planner(
    runtime: DistributedRuntime, config: PlannerConfig, *, connector: PlannerConnector | None = None
) -> None:
    """Plan a deployment until cancelled, through the connector of the settings or another one. Raises `ConfigError`."""
    clock = SystemClock()
    connector = connector or make_connector(config, runtime, clock)
    leader = Precedence(runtime, config.namespace, is_advisory=config.advisory)
    parts = make_parts(config, runtime, connector, leader, clock)
    service = PlannerService(config, parts)
    try:
        await connector.start()
        capabilities = await wait_for_workers(connector, config, clock)
        workers = await directory_of(connector, runtime, config).live()
        await service.start(capabilities, await measured_steps(runtime, config, workers))
        await leader.join(service.status)
        logger.info(
            "planner ready: namespace %s, mode %s, target %s, a tick every %g s%s",
            config.namespace,
            config.mode.value,
            config.optimization_target.value,
            config.scheduling.scale_interval_seconds,
            ", advisory" if config.advisory else "",
        )
        await serve_and_run(service, runtime.metrics, parts.reports)
    finally:
        await service.close()
        await leader.leave()


async def serve_and_run(
    service: PlannerService, registry: MetricsRegistry, reports: ReportRecorder | None = None
) -> None:
    """Run ticks until cancelled, with the HTTP services of the settings whose ports are free."""
    config = service.config
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serve_optional(
                metrics_routes(registry), config.metric_reporting_prometheus_port, "metric_reporting_prometheus_port"
            )
        )
        await stack.enter_async_context(
            serve_optional(control_routes(service), config.control_api_port, "control_api_port", host=LOOPBACK)
        )
        if reports is not None:
            await stack.enter_async_context(
                serve_optional(reports.routes(), config.live_dashboard_port, "live_dashboard_port")
            )
        await service.run()


def make_connector(config: PlannerConfig, runtime: DistributedRuntime, clock: Clock) -> PlannerConnector:
    """Return the connector of the environment. Raise `ConfigError` for one that cannot be used here."""
    if config.environment is DeployEnvironment.KUBERNETES:
        from dynamo.planner.connectors.kubernetes import KubernetesConnector

        return KubernetesConnector(config, runtime.discovery)
    if config.environment is DeployEnvironment.GLOBAL_PLANNER:
        return GlobalPlannerConnector(runtime, config, clock=clock)
    return VirtualConnector(runtime, config, clock=clock)


def directory_of(connector: PlannerConnector, runtime: DistributedRuntime, config: PlannerConfig) -> WorkerDirectory:
    """Return the workers that the planner observes: those of the connector's present generation, if it has generations."""
    namespace = connector.worker_namespace if isinstance(connector, GenerationalConnector) else config.namespace
    return WorkerDirectory(runtime.discovery, namespace, config.model_name)


def make_parts(
    config: PlannerConfig, runtime: DistributedRuntime, connector: PlannerConnector, leader: Precedence, clock: Clock
) -> PlannerParts:
    """Return the parts of a planner in this runtime."""
    directory = directory_of(connector, runtime, config)
    is_forecast = config.scaling_policy is ScalingPolicy.FORECAST
    steps = LiveSteps(directory, StepObserver(runtime, clock, with_prompts=is_forecast))
    observer = Observer(connector, steps, make_traffic(config, runtime, clock), clock)
    return PlannerParts(
        connector=connector,
        observer=observer,
        registry=runtime.metrics,
        log=DecisionLog(config.log_dir),
        clock=clock,
        reports=ReportRecorder(config),
        plugins=make_plugins(config, clock, runtime.metrics),
        hold=leader.preceding,
    )


def make_plugins(config: PlannerConfig, clock: Clock, registry: MetricsRegistry) -> TickPlugins | None:
    """Return the plugins that the settings name or admit; None without any. Raise `ConfigError` without the extra `grpc`."""
    scheduling = config.scheduling
    has_plugins = scheduling.external_plugins or config.plugin_registration.in_process_plugins
    if not has_plugins and not scheduling.gateway.enabled:
        return None
    try:
        from dynamo.planner.plugin_transport.host import PluginHost
    except ModuleNotFoundError as error:
        raise ConfigError(f"plugins: {error.name} is not installed; pip install 'dynamo-serve[grpc]'") from None
    return PluginHost(config, clock.now, PluginMetrics(registry).called)


def make_traffic(config: PlannerConfig, runtime: DistributedRuntime, clock: Clock) -> TrafficSource:
    """Return the source of traffic: a Prometheus server if the settings name one, otherwise the frontends themselves."""
    if config.metric_pulling_prometheus_endpoint not in ("", PROMETHEUS):
        return PrometheusTraffic(config, config.namespace)
    return FrontendScraper(runtime.discovery, config.namespace, clock, config.model_name)


async def wait_for_workers(connector: PlannerConnector, config: PlannerConfig, clock: Clock) -> WorkerCapabilities:
    """Wait until a worker of each scaled role is ready, and return the capabilities. Raises `ConfigError` when late."""
    limit_s = setting("SCALING_MAX_WAIT_TIME", 1800.0, float)
    deadline_s = clock.now() + limit_s
    announced = ""
    while True:
        try:
            missing = missing_roles(await connector.counts(), config)
            if not missing:
                return await connector.capabilities()
            cause = f"no {' and no '.join(missing)} worker"
        except (DynamoException, OSError) as error:
            cause = f"the workers are unknown: {error}"
        if clock.now() >= deadline_s:
            raise ConfigError(f"namespace {config.namespace}: {cause} within {limit_s:g} s (SCALING_MAX_WAIT_TIME)")
        if cause != announced:
            logger.info("namespace %s: %s; waiting", config.namespace, cause)
            announced = cause
        await clock.sleep(POLL_S)


def missing_roles(counts: WorkerCounts, config: PlannerConfig) -> list[str]:
    """Return the scaled roles that have no ready worker."""
    roles = (
        ("prefill", config.mode.scales_prefill, counts.ready_num_prefill),
        ("decode", config.mode.scales_decode, counts.ready_num_decode),
    )
    return [role for role, is_scaled, ready in roles if is_scaled and not ready]


def metrics_routes(registry: MetricsRegistry) -> JsonRoutes:
    """Return the routes of `metric_reporting_prometheus_port`."""
    routes, page = JsonRoutes(), MetricsPage(registry)

    async def metrics(call: HttpCall[None]) -> tuple[int, TextBody]:
        content_type, body = await page.respond(call.headers.get("accept", ""))
        return 200, TextBody(body, content_type)

    routes.add("GET", "/metrics", metrics)
    return routes
