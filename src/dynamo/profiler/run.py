"""Run of the profiler: phases from the specification to the files of the result."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.k8s.client import KubeClient
from dynamo.profiler import curves, plots
from dynamo.profiler.config import ProfilerConfig
from dynamo.profiler.graph.assembly import Assembly
from dynamo.profiler.graph.features import interpolation_spec
from dynamo.profiler.models import model_config, model_directory, stored_bytes
from dynamo.profiler.rapid import PickedDeployment, rapid
from dynamo.profiler.spec import ProfileSpec
from dynamo.profiler.status import StatusFile
from dynamo.profiler.thorough.aiperf import AiperfLoad
from dynamo.profiler.thorough.cluster import ClusterDeployer
from dynamo.profiler.thorough.deployment import Deployer, RunningDeployment
from dynamo.profiler.thorough.load import LoadGenerator, ReplayLoad
from dynamo.profiler.thorough.local import LocalDeployer
from dynamo.profiler.thorough.sweep import MeasuredEngine, ThoroughSweep

logger = logging.getLogger(__name__)

FINAL_CONFIG = "final_config.yaml"
PICKED_CONFIG = "picked_dgd_config.yaml"
CANDIDATE_PREFIX = "profile"
"""Beginning of the names of candidates outside of the operator."""


@dataclass(slots=True)
class ProfilerRun:
    """One run, whose progress is in its status file."""

    config: ProfilerConfig
    spec: ProfileSpec
    status: StatusFile
    request_name: str = ""
    """Name of the DynamoGraphDeploymentRequest; empty outside of the operator."""

    @property
    def directory(self) -> Path:
        """Return the folder of results."""
        return Path(self.config.output_dir)

    def execute(self) -> None:
        """Find the deployment and write it. Raise `ConfigError` if there is none."""
        if self.config.dry_run:
            logger.warning("dry run: %s has no deployment", FINAL_CONFIG)
            self._write(FINAL_CONFIG, None)
        else:
            self.status.enter("SweepingPrefill", "Sweeping parallelization strategies")
            picked = self._picked()
            if not self.spec.is_thorough:
                self.status.enter("SelectingConfig", "Selecting the configuration with the lowest cost")
            self._log(picked)
            documents = self._curves(picked)
            self.status.enter("GeneratingDGD", "Packaging data and generating the final deployment")
            self._write_graph(picked, documents)
        self.status.finish({"final_config": FINAL_CONFIG})

    def _picked(self) -> PickedDeployment:
        if self.spec.is_thorough:
            return asyncio.run(self._measured())
        return rapid(self.spec, model_config(self.spec), stored_bytes(model_directory(self.spec)))

    async def _measured(self) -> PickedDeployment:
        """Measure candidates on this machine or in the cluster. Raise `ConfigError` without either."""
        config, spec = self.config, self.spec
        async with contextlib.AsyncExitStack() as stack:
            if config.local_worker is not None:
                local = LocalDeployer(config.local_worker, spec.model, spec.backend, config.deployment_timeout)
                sweep = self._sweep(local)
            else:
                client = _cluster()
                stack.push_async_callback(client.close)
                namespace = environ().get("DGDR_NAMESPACE") or client.namespace
                prefix = self.request_name or CANDIDATE_PREFIX
                cluster = ClusterDeployer(client, spec, namespace, prefix, config.deployment_timeout)
                await cluster.remove_leftovers()
                sweep = self._sweep(cluster)
            picked = await sweep.run()
        self._draw_candidates(sweep.measured)
        return picked

    def _draw_candidates(self, measured: Sequence[MeasuredEngine]) -> None:
        if not self._draws():
            return
        points = [point for one in measured for point in (one.prefill, *one.decodes)]
        gpus = {one.parallel.label(): (one.parallel.num_gpus, one.parallel.dp) for one in measured}
        plots.draw_candidates(self.directory, points, gpus)

    def _draws(self) -> bool:
        """Return whether plots can be drawn; log what is missing if not."""
        if plots.has_matplotlib():
            return True
        logger.info("no plots are drawn: they need matplotlib (pip install 'dynamo-serve[plots]')")
        return False

    def _sweep(self, deployer: Deployer) -> ThoroughSweep:
        return ThoroughSweep(
            self.spec, self.config, model_config(self.spec), self.status.enter, deployer, self._load_generator
        )

    def _load_generator(self, deployment: RunningDeployment, directory: Path) -> LoadGenerator:
        if self.config.load_generator == "aiperf":
            tokenizer = str(model_directory(self.spec) or self.spec.model)
            return AiperfLoad(deployment, self.config.aiperf, tokenizer, directory)
        return ReplayLoad(deployment)

    def _log(self, picked: PickedDeployment) -> None:
        one = picked.config
        roles = [("prefill", one.prefill)] if one.prefill else []
        for role, choice in [*roles, ("decode" if roles else "aggregated", one.decode)]:
            assert choice is not None
            logger.info(
                "selected %s: %d x %s, %d GPUs each, batch %d",
                role, choice.replicas, choice.parallel.label(), choice.parallel.num_gpus, choice.batch,
            )  # fmt: skip
        if picked.decode_engine is not None:
            logger.info(
                "estimate: TTFT %.0f ms, ITL %.1f ms, %.2f requests/s, %.0f tokens/s per GPU",
                one.ttft_ms, one.itl_ms, one.request_rate, one.tokens_per_gpu,
            )  # fmt: skip
        if picked.accuracy is not None:
            logger.info(
                "its source: %s; median errors on engines left out of the fit: TTFT %.0f %%, ITL %.0f %%",
                picked.accuracy.source, 100 * picked.accuracy.ttft_error, 100 * picked.accuracy.tpot_error,
            )  # fmt: skip
        for line in picked.warnings:
            logger.warning("%s", line)

    def _curves(self, picked: PickedDeployment) -> dict[str, Any] | None:
        """Write the performance data of the picked engines, if planner or mocker read them, and return the documents."""
        if picked.curves is not None:
            return self._saved(*picked.curves)
        if not self.spec.needs_curves or picked.prefill_engine is None or picked.decode_engine is None:
            return None
        self.status.enter("BuildingCurves", "Building performance curves of the picked engines")
        options = self.config
        prefill = curves.estimated_prefill(
            picked.prefill_engine, picked.max_context, options.prefill_interpolation_granularity
        )
        decode = curves.estimated_decode(
            picked.decode_engine, picked.max_context, options.decode_interpolation_granularity
        )
        return self._saved(prefill, decode)

    def _saved(self, prefill: curves.PrefillCurve, decode: curves.DecodeCurve) -> dict[str, Any]:
        """Write the curves as arrays and as plots, and return their documents."""
        curves.write(self.directory, prefill, decode)
        if self._draws():
            plots.draw_curves(self.directory, prefill, decode)
        return curves.documents(prefill, decode)

    def _write_graph(self, picked: PickedDeployment, documents: dict[str, Any] | None) -> None:
        granularity = (
            self.config.prefill_interpolation_granularity,
            self.config.decode_interpolation_granularity,
        )
        assembly = Assembly(
            spec=self.spec,
            config=picked.config,
            backend=picked.backend,
            curves=documents,
            interpolation=interpolation_spec(self.spec, picked.config, picked.backend, picked.max_context, granularity),
            request_name=self.request_name,
            suffix=lambda: secrets.token_hex(2),
        )
        if self.spec.uses_mocker or self.spec.has_planner:
            self._write(PICKED_CONFIG, assembly.picked())
        self._write(FINAL_CONFIG, *assembly.documents())

    def _write(self, name: str, *documents: Any) -> None:
        """Write YAML documents to a file of the result."""
        path = self.directory / name
        try:
            path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
        except OSError as error:
            raise ConfigError(
                f"--output-dir {self.directory}: cannot write {name}: {error.strerror or error}"
            ) from None


def _cluster() -> KubeClient:
    """Return a client of the cluster. Raise `ConfigError` where there is none."""
    try:
        return KubeClient()
    except ConfigError as error:
        raise ConfigError(
            f"searchStrategy: thorough: needs a cluster for its candidates ({error}), or --local-worker, the command of a "
            "worker to measure on this machine"
        ) from None
