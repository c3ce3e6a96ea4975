"""Decision log: the last decisions in memory, and the ticks of a run as JSON lines that `core.record.replay` can read.

A run writes numbered files of bounded size, `planner-ticks-<start>-<number>.jsonl`. The first line of each is the state of the planner
at that time, so that every file is replayed by itself; the oldest ones of the run are deleted.
"""

import logging
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dynamo.planner.core.record import Start, Tick, encode
from dynamo.protocols.planner import ScalingDecision, TrafficObservation, WorkerCounts

logger = logging.getLogger(__name__)

KEPT_DECISIONS = 256
FILE_BYTES, FILES_MAX = 64 << 20, 16
"""1 GiB: about three days of 64 workers at a tick of five seconds."""


class DecisionSummary(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tick: what was observed, decided and done, and why."""

    tick: int
    time: str
    """UTC time in ISO 8601."""
    action: str
    load_reason: str = ""
    throughput_reason: str = ""
    counts: WorkerCounts | None = None
    traffic: TrafficObservation | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    estimated_ttft_ms: float | None = None
    estimated_itl_ms: float | None = None
    predictions: Any = None
    proposals: list[str] = []
    """Each stage's results in words."""
    clamped: list[str] = []
    scale_to: ScalingDecision | None = None
    outcome: str = ""
    """Status of the scale request: `accepted`, `held`, `failed` or `advisory`; empty without one."""
    message: str = ""
    unknown: list[str] = []
    """Observations that were not available, with the causes."""
    duration_s: float = 0.0

    @property
    def line(self) -> str:
        """The decision in one line."""
        target = "no change"
        if self.scale_to is not None:
            pairs = (("prefill", self.scale_to.num_prefill), ("decode", self.scale_to.num_decode))
            target = ", ".join(f"{role} {number}" for role, number in pairs if number is not None)
        reasons = f"load {self.load_reason}, throughput {self.throughput_reason}"
        done = f"; {self.outcome}: {self.message}" if self.outcome else ""
        missing = f"; unknown: {'; '.join(self.unknown)}" if self.unknown else ""
        return f"tick {self.tick}: {target} ({reasons}){done}{missing}"


class DecisionLog:
    """Decisions of one planner. One owner."""

    def __init__(
        self, directory: str | None = None, *, kept: int = KEPT_DECISIONS, file_bytes: int = FILE_BYTES
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._file_bytes = file_bytes
        self._recent: deque[DecisionSummary] = deque(maxlen=kept)
        self._files: deque[Path] = deque()
        self._prefix = ""
        self._number = 0
        self._written = 0

    @property
    def path(self) -> Path | None:
        """File that is being written; None without a directory, or after an error."""
        return self._files[-1] if self._directory is not None and self._files else None

    @property
    def is_full(self) -> bool:
        """Whether the next tick belongs to a new file, which `begin` creates."""
        return self._written >= self._file_bytes

    def begin(self, start: Start) -> None:
        """Begin a file with the state of the planner; a directory that cannot be written ends the file, not the planner."""
        if self._directory is None:
            return
        if not self._prefix:
            self._prefix = f"planner-ticks-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        self._files.append(self._directory / f"{self._prefix}-{self._number:04}.jsonl")
        self._number += 1
        self._written = 0
        self._write(encode(start))
        while len(self._files) > FILES_MAX:
            self._files.popleft().unlink(missing_ok=True)

    def add(self, summary: DecisionSummary, tick: Tick | None) -> None:
        """Keep a decision; `tick` is its record, None for a tick without one."""
        self._recent.append(summary)
        if tick is not None:
            self._write(encode(tick))

    def recent(self, count: int = KEPT_DECISIONS) -> list[DecisionSummary]:
        """Return the last decisions, the newest last."""
        return list(self._recent)[max(0, len(self._recent) - count) :]

    def _write(self, line: bytes) -> None:
        path = self.path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(line)
        except OSError as error:
            logger.error("decision log ends: failed to write %s: %s", path, error.strerror)  # noqa: TRY400 - one line
            self._directory = None
            self._written = 0
        else:
            self._written += len(line)
