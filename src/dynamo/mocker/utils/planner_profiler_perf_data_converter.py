"""Converter of a profiler's results into the mocker's lookup tables.

    python -m dynamo.mocker.utils.planner_profiler_perf_data_converter --profile_results_dir DIRECTORY

`--planner-profile-data` reads such directories itself; the file is for mockers of other releases.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.core import logging as logs
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.mocker.profile import GRID, RAW, TABLES, profiled

logger = logging.getLogger(__name__)

FILE = "perf_data.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConverterOptions:
    """Converts a profiler's results into the lookup tables of the mocker."""

    profile_results_dir: str = option("", "--profile_results_dir", None, "Directory of the profiler's results")
    resolution: int = option(GRID, "--resolution", None, "Points of each side of the decode table")
    output_dir: str = option("", "--output_dir", None, f"Directory for {FILE}; default: that of the results")

    def __post_init__(self) -> None:
        if not self.profile_results_dir:
            raise ConfigError("--profile_results_dir is missing: expected a directory")
        if self.resolution < 2:
            raise ConfigError(f"--resolution {self.resolution}: expected 2 or more")


def convert_profile_results_to_npz(
    profile_results_dir: str | Path, output_path: str | Path, resolution: int = GRID
) -> Path:
    """Write the lookup tables of a directory. Raise `FileNotFoundError` without results, `ConfigError`, `OSError`."""
    import numpy as np

    source, target = Path(profile_results_dir), Path(output_path)
    if not is_profile_results_dir(source):
        raise FileNotFoundError(f"no profiling results in {source}")
    timing = profiled(str(source), grid=resolution)
    columns = (
        timing.prefill_tokens,
        timing.prefill_times_ms,
        timing.kv_tokens,
        timing.context_lengths,
        timing.step_times_ms,
    )
    arrays: dict[str, Any] = {name: np.array(column) for name, column in zip(TABLES, columns, strict=True)}
    np.savez(target, **arrays)
    logger.info("wrote %s", target)
    return target


def is_profile_results_dir(path: Path) -> bool:
    """Return whether a directory has the prefill and decode results of a profiler."""
    return all(any((path / files[phase]).exists() for files in RAW) for phase in (0, 1))


def is_mocker_format_npz(path: Path) -> bool:
    """Return whether a file has the mocker's lookup tables."""
    import numpy as np

    if path.suffix != ".npz" or not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as data:
            return set(TABLES) <= set(data.files)
    except (OSError, ValueError):
        return False


def main() -> int:
    """Convert the directory of the command line. Raises `ConfigError`."""
    options = load(ConverterOptions, sys.argv[1:], prog=f"python -m {__spec__.name}")
    logs.setup(component="mocker")
    folder = Path(options.output_dir or options.profile_results_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        convert_profile_results_to_npz(options.profile_results_dir, folder / FILE, options.resolution)
    except OSError as error:
        raise ConfigError(f"--profile_results_dir {options.profile_results_dir}: {error}") from None
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
