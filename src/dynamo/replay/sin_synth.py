"""SinSynth: a load whose request rate and mix of two request shapes follow sines."""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.replay.datagen import write_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SinConfig:
    """Generates a trace whose request rate and mix of two shapes follow sines."""

    block_size: int = option(512, "--block-size", None, "Tokens per hash id")
    total_blocks: int = option(10_000, "--total-blocks", None, "Number of distinct blocks")
    output_file: str | None = option(
        None, "--output-file", None, "Output file (default: a name derived from the flags)"
    )
    time_duration: float = option(100.0, "--time-duration", None, "Seconds")
    process_interval: float = option(1.0, "--process-interval", None, "Sampling interval of the sines in seconds")
    request_rate_min: float = option(5.0, "--request-rate-min", None, "Minimum requests per second")
    request_rate_max: float = option(10.0, "--request-rate-max", None, "Maximum requests per second")
    request_rate_period: float = option(10.0, "--request-rate-period", None, "Period of the request rate in seconds")
    isl1: int = option(100, "--isl1", None, "Prompt tokens of the first shape")
    osl1: int = option(2000, "--osl1", None, "Answer tokens of the first shape")
    isl2: int = option(5000, "--isl2", None, "Prompt tokens of the second shape")
    osl2: int = option(100, "--osl2", None, "Answer tokens of the second shape")
    isl_osl_ratio_min: float = option(0.2, "--isl-osl-ratio-min", None, "Minimum share of the first shape")
    isl_osl_ratio_max: float = option(0.8, "--isl-osl-ratio-max", None, "Maximum share of the first shape")
    isl_osl_ratio_period: float = option(10.0, "--isl-osl-ratio-period", None, "Period of the share in seconds")
    seed: int = option(0, "--random-seed", None, "Random seed", aliases=("--seed",))

    def __post_init__(self) -> None:
        if not 0 <= self.request_rate_min <= self.request_rate_max:
            raise ConfigError("--request-rate-min must be from 0 to --request-rate-max")
        if not 0 <= self.isl_osl_ratio_min <= self.isl_osl_ratio_max <= 1:
            raise ConfigError("--isl-osl-ratio-min must be from 0 to --isl-osl-ratio-max, and that at most 1")
        for flag, value in (
            ("--block-size", self.block_size),
            ("--total-blocks", self.total_blocks),
            ("--process-interval", self.process_interval),
            ("--request-rate-period", self.request_rate_period),
            ("--isl-osl-ratio-period", self.isl_osl_ratio_period),
            ("--isl1", self.isl1),
            ("--isl2", self.isl2),
            ("--osl1", self.osl1),
            ("--osl2", self.osl2),
        ):
            if value <= 0:
                raise ConfigError(f"{flag} {value:g}: expected more than 0")

    @property
    def file_name(self) -> str:
        """Return the default output file name."""
        rate = f"rr{self.request_rate_min:g}-{self.request_rate_max:g}-{self.request_rate_period:g}"
        shapes = f"io{self.isl1}{self.osl1}-{self.isl2}{self.osl2}"
        mix = f"{self.isl_osl_ratio_min:g}-{self.isl_osl_ratio_max:g}-{self.isl_osl_ratio_period:g}"
        return f"sinusoidal_b{self.block_size}_t{self.time_duration:g}_{rate}_{shapes}-{mix}.jsonl"


def rows(config: SinConfig) -> list[dict[str, Any]]:
    """Return the rows of the trace."""
    rng = random.Random(config.seed)
    found: list[dict[str, Any]] = []
    at = 0.0
    while at < config.time_duration:
        rate = swing(at, config.request_rate_min, config.request_rate_max, config.request_rate_period)
        share = swing(at, config.isl_osl_ratio_min, config.isl_osl_ratio_max, config.isl_osl_ratio_period)
        length = min(config.process_interval, config.time_duration - at)
        for moment in sorted(rng.uniform(at, at + length) for _ in range(poisson(rng, rate * length))):
            is_first = rng.random() < share
            isl, osl = (config.isl1, config.osl1) if is_first else (config.isl2, config.osl2)
            ids = [rng.randrange(config.total_blocks) for _ in range(-(-isl // config.block_size))]
            found.append({"timestamp": int(moment * 1000), "input_length": isl, "output_length": osl, "hash_ids": ids})
        at += config.process_interval
    return found


def swing(at: float, low: float, high: float, period: float) -> float:
    """Return a sine between two levels that begins at the lower one."""
    return (high + low) / 2 + (high - low) / 2 * math.sin(2 * math.pi * at / period - math.pi / 2)


def poisson(rng: random.Random, mean: float) -> int:
    """Draw a Poisson-distributed number with the given mean."""
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count += 1
        left += rng.expovariate(1.0)
    return count


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.sin_synth") -> int:
    """Write the trace and print its path."""
    config = load(SinConfig, argv, prog=prog)
    path = config.output_file or config.file_name
    found = rows(config)
    write_rows(path, found)
    print(f"{len(found)} requests in {path}")
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
