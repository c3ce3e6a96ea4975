"""Run of the profiler: phases from the specification to the files of the result."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dynamo.core.errors import ConfigError
from dynamo.profiler import curves
from dynamo.profiler.config import ProfilerConfig
from dynamo.profiler.graph.assembly import Assembly
from dynamo.profiler.graph.features import interpolation_spec
from dynamo.profiler.models import model_config, model_directory, stored_bytes
from dynamo.profiler.rapid import PickedDeployment, rapid
from dynamo.profiler.spec import ProfileSpec
from dynamo.profiler.status import StatusFile
from dynamo.profiler.thorough.sweep import ThoroughSweep

logger = logging.getLogger(__name__)

FINAL_CONFIG = "final_config.yaml"
PICKED_CONFIG = "picked_dgd_config.yaml"


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
            if self.config.local_worker is None:
                raise ConfigError(
                    "searchStrategy: thorough: needs --local-worker, the command of a worker to measure on this machine; "
                    "this release does not deploy candidates in Kubernetes: use rapid there"
                )
            sweep = ThoroughSweep(self.spec, self.config, model_config(self.spec), self.status.enter)
            return asyncio.run(sweep.run())
        return rapid(self.spec, model_config(self.spec), stored_bytes(model_directory(self.spec)))

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
            curves.write(self.directory, *picked.curves)
            return curves.documents(*picked.curves)
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
        curves.write(self.directory, prefill, decode)
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
