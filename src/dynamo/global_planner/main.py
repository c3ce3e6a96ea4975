"""Global planner: `python -m dynamo.global_planner`, its options and endpoints.

<namespace>.GlobalPlanner.scale_request   decides and executes a scale request of a planner
<namespace>.GlobalPlanner.health          returns the state of the process
"""

import logging
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.global_planner.arbitration import GpuArbiter, TotalGpuBand
from dynamo.global_planner.executor import ScaleExecutor, VirtualExecutor
from dynamo.global_planner.handler import ScaleRequestHandler
from dynamo.protocols.scaling import WorkerRole
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.run_service import open_runtime, run_service
from dynamo.runtime.server import ServeOptions
from dynamo.runtime.streams import GeneratorHandler

logger = logging.getLogger(__name__)

COMPONENT = "GlobalPlanner"
DRAIN_S = 5.0
"""Time for running requests at the shutdown; a planner repeats its request at its next tick."""
MAX_REQUESTS = 256
"""Running requests: they wait for each other, and each deployment sends one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlannerOptions(RuntimeOptions):
    """Global planner: executes the scale requests of several deployments under one band of GPUs."""

    COMMON: ClassVar = ("--managed-namespaces", "--environment", "--max-total-gpus", "--min-total-gpus")
    namespace: str | None = option(None, "--namespace", "DYN_NAMESPACE", "Namespace of the global planner's endpoints")
    managed_namespaces: list[str] = option(
        [],
        "--managed-namespaces",
        None,
        "Namespaces that may send requests, separated by spaces or commas; default: all",
    )
    environment: str = option(
        "kubernetes", "--environment", None, "Executor of decisions", choices=("kubernetes", "virtual")
    )
    operation: bool = option(True, "--operation", None, "Execute requests; --no-operation only logs them")
    max_total_gpus: int = option(-1, "--max-total-gpus", None, "Maximum GPUs of all deployments; -1: no limit")
    min_total_gpus: int = option(-1, "--min-total-gpus", None, "Minimum GPUs of all deployments; -1: none")
    intent_cache_ttl_seconds: float = option(
        360.0, "--intent-cache-ttl-seconds", None, "Seconds for which a request can be paired with later ones"
    )
    prefill_gpus: int = option(1, "--prefill-gpus", None, "GPUs of a prefill replica with --environment virtual")
    decode_gpus: int = option(1, "--decode-gpus", None, "GPUs of a decode replica with --environment virtual")

    def __post_init__(self) -> None:
        if not self.namespace:
            raise ConfigError("DYN_NAMESPACE is not set: expected the namespace of the global planner")
        for flag, value, least in (
            ("--max-total-gpus", self.max_total_gpus, -1),
            ("--min-total-gpus", self.min_total_gpus, -1),
            ("--prefill-gpus", self.prefill_gpus, 0),
            ("--decode-gpus", self.decode_gpus, 0),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: must be {least} or more")
        if 0 <= self.max_total_gpus < self.min_total_gpus:
            raise ConfigError(
                f"--min-total-gpus {self.min_total_gpus}: must be at most {self.max_total_gpus}, the maximum"
            )
        if not (math.isfinite(self.intent_cache_ttl_seconds) and self.intent_cache_ttl_seconds > 0):
            raise ConfigError(f"--intent-cache-ttl-seconds {self.intent_cache_ttl_seconds:g}: must be more than 0")


def separated(argv: Sequence[str]) -> list[str]:
    """Return a command line whose `--managed-namespaces a b` is `--managed-namespaces a,b`."""
    words: list[str] = []
    is_list = False
    for word in argv:
        if word.startswith("-"):
            is_list = word == "--managed-namespaces"
        elif is_list and words[-1] != "--managed-namespaces":
            words[-1] += f",{word}"
            continue
        words.append(word)
    return words


def main() -> int:
    """Run the global planner until it is stopped. Raises `ConfigError`."""
    options = load(GlobalPlannerOptions, separated(sys.argv[1:]), prog="python -m dynamo.global_planner")
    return run_service("global-planner", serve(options))


def make_executor(options: GlobalPlannerOptions, runtime: DistributedRuntime) -> ScaleExecutor:
    """Return the executor of the environment. Raise `ConfigError` without a configuration of the cluster."""
    if options.environment == "kubernetes":
        from dynamo.global_planner.kubernetes_executor import KubernetesExecutor

        return KubernetesExecutor(options.managed_namespaces)
    gpus: dict[WorkerRole, int] = {"prefill": options.prefill_gpus, "decode": options.decode_gpus}
    return VirtualExecutor(runtime, options.managed_namespaces, gpus)


@asynccontextmanager
async def serve(options: GlobalPlannerOptions) -> AsyncIterator[None]:
    """Serve both endpoints; drain at the end of the block."""
    async with open_runtime(options) as runtime:
        band = TotalGpuBand(options.min_total_gpus, options.max_total_gpus)
        managed = options.managed_namespaces
        executor = make_executor(options, runtime) if options.operation else None
        arbiter = GpuArbiter(band, options.intent_cache_ttl_seconds)
        handler = ScaleRequestHandler(arbiter, executor, managed, runtime.metrics)

        async def health(_request: Any) -> AsyncIterator[Any]:
            yield {
                "status": "healthy",
                "component": COMPONENT,
                "namespace": options.namespace,
                "managed_namespaces": managed or "all",
            }

        servings = []
        for name, generate, limits in (
            ("scale_request", handler.scale_request, ServeOptions(inflight_max=MAX_REQUESTS)),
            ("health", health, ServeOptions(health_check_payload={"text": "health"})),
        ):
            endpoint = runtime.endpoint(f"{options.namespace}.{COMPONENT}.{name}")
            servings.append(await endpoint.serve(GeneratorHandler(generate, runtime.tasks), limits))
        logger.info(
            "global planner ready: %s, %d to %d GPUs, namespaces %s",
            "no operation" if executor is None else options.environment,
            band.min_gpus,
            band.max_gpus,
            ", ".join(managed) or "all",
        )
        yield
        logger.info("draining")
        for serving in servings:
            await serving.close(DRAIN_S)
