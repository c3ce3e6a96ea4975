"""Status file of the profiler: state, phase and error, which the operator's sidecar publishes."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dynamo.core.errors import ConfigError
from dynamo.protocols.kubernetes.v1beta1 import ProfilingPhase

logger = logging.getLogger(__name__)

STATUS_FILE = "profiler_status.yaml"
RunState = Literal["running", "success", "failed"]


@dataclass(slots=True)
class StatusFile:
    """Writer of the status file of one run."""

    directory: Path
    phase: ProfilingPhase | None = None

    def enter(self, phase: ProfilingPhase, message: str) -> None:
        """Report the phase that begins."""
        self.phase = phase
        logger.info("%s: %s", phase, message)
        self._write("running", message=message)

    def fail(self, message: str, error: str) -> None:
        """Report why the run failed."""
        self._write("failed", message=message, error=error)

    def finish(self, outputs: Mapping[str, str]) -> None:
        """Report success."""
        self.phase = "Done"
        self._write("success", message="Profiler completed successfully", outputs=dict(outputs))

    def _write(self, state: RunState, **fields: Any) -> None:
        """Replace the file in one step: the sidecar never reads a part of it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        data = {"status": state, "timestamp": now, **fields}
        if self.phase is not None:
            data["phase"] = self.phase
        path = self.directory / STATUS_FILE
        temporary = path.with_suffix(".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text(yaml.safe_dump(data, sort_keys=False))
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise ConfigError(
                f"--output-dir {self.directory}: cannot write {path.name}: {error.strerror or error}"
            ) from None
