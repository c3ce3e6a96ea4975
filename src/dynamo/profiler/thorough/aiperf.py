"""aiperf: measurements by the released load generator, which runs as a process of its own environment."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.profiler.thorough.deployment import RunningDeployment, last_line
from dynamo.profiler.thorough.load import LoadSample

logger = logging.getLogger(__name__)

EXPORT = "profile_export_aiperf.json"
SEED = 100
RUN_TIMEOUT_S = 3600.0
STOP_S = 10.0
CONSTANT = (
    "--endpoint-type", "chat", "--endpoint", "/v1/chat/completions", "--streaming",
    "--request-timeout-seconds", "1800", "--extra-inputs", "ignore_eos:true", "--synthetic-input-tokens-stddev", "0",
    "--output-tokens-stddev", "0", "--ui", "none", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics",
)  # fmt: skip
"""Arguments of every run: tokens are counted by the server, and telemetry is off, which a measurement does not need."""


@dataclass(slots=True)
class AiperfLoad:
    """aiperf against one deployment; the artifacts of each run are a folder of their own."""

    deployment: RunningDeployment
    command: str
    tokenizer: str
    directory: Path
    warmup_requests: int = 3
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def warm_up(self, isl: int, osl: int, requests: int) -> None:
        """Note the requests that warm up each run: aiperf sends them itself."""
        self.warmup_requests = requests

    async def run(self, isl: int, osl: int, concurrency: int, *, repeats: bool) -> LoadSample:
        """Send `concurrency` requests together and return their latencies. Raise `ConfigError` if aiperf fails."""
        # Equal seeds make equal prompts: only a run that fills the cache is followed by one with its seed.
        seed = SEED + next(self._numbers)
        folder = self.directory / f"aiperf_isl{isl}_osl{osl}_n{concurrency}"
        if repeats:
            await self._profile(folder.with_name(f"{folder.name}_warmup"), isl, osl, concurrency, seed)
        return sampled(await self._profile(folder, isl, osl, concurrency, seed))

    def arguments(self, folder: Path, isl: int, osl: int, concurrency: int, seed: int) -> list[str]:
        """Return the command line of one run."""
        changing = {
            "--model": self.deployment.model,
            "--tokenizer": self.tokenizer,
            "--url": self.deployment.url,
            "--synthetic-input-tokens-mean": isl,
            "--output-tokens-mean": osl,
            "--concurrency": concurrency,
            "--request-count": concurrency,
            "--num-dataset-entries": concurrency + self.warmup_requests,
            "--warmup-request-count": self.warmup_requests,
            "--workers-max": min(8, concurrency),
            "--artifact-dir": folder,
            "--random-seed": seed,
        }
        lengths = [word for name in ("max_tokens", "min_tokens") for word in ("--extra-inputs", f"{name}:{osl}")]
        words = [self.command, "profile", *CONSTANT, *lengths]
        return words + [str(word) for pair in changing.items() for word in pair]

    async def _profile(self, folder: Path, isl: int, osl: int, concurrency: int, seed: int) -> Mapping[str, Any]:
        """Run aiperf once and return its export."""
        log = folder / "aiperf.log"
        code = await _finished(self.arguments(folder, isl, osl, concurrency, seed), log)
        if code:
            raise ConfigError(f"--aiperf {self.command}: exit code {code}: {last_line(log)}; see {log}")
        return exported(folder / EXPORT, self.command)


async def _finished(command: list[str], log: Path) -> int:
    """Return the exit code of a process, whose group ends with the caller."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=file, stderr=file, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                env={name: value for name, value in environ().items() if name not in {"PYTHONPATH", "PYTHONHOME"}},
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"--aiperf {command[0]}: cannot start: {error.strerror or error}") from None
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                return await process.wait()
        except TimeoutError:
            raise ConfigError(f"--aiperf {command[0]}: not done after {RUN_TIMEOUT_S:g} s; see {log}") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def exported(path: Path, command: str) -> Mapping[str, Any]:
    """Return the export of a run. Raise `ConfigError` if aiperf wrote none."""
    try:
        found: Mapping[str, Any] = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--aiperf {command}: cannot read {path}: {error}") from None
    return found


def sampled(export: Mapping[str, Any]) -> LoadSample:
    """Return the latencies of an export. Missing metrics are 0, as in a run without answered requests."""

    def metric(name: str, statistic: str = "avg") -> float:
        return float((export.get(name) or {}).get(statistic) or 0.0)

    return LoadSample(
        answered=int(metric("request_count")),
        ttft_ms=metric("time_to_first_token"),
        last_ttft_ms=metric("time_to_first_token", "max"),
        itl_ms=metric("inter_token_latency"),
    )
