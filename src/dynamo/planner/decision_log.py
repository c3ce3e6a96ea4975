"""Decision log: the last decisions in memory, and all ticks of a run as JSON lines that `core.record.replay` can read.

A run writes numbered segments of bounded size, `planner-ticks-<start>-<number>.jsonl`; the first line of segment 0 is the start. The
concatenation of all segments is replayed. Beyond `SEGMENTS_MAX` the log ends, because a record without its beginning is of no use.
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
SEGMENT_BYTES, SEGMENTS_MAX = 64 << 20, 16
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
        self, directory: str | None = None, *, kept: int = KEPT_DECISIONS, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._segment_bytes = segment_bytes
        self._recent: deque[DecisionSummary] = deque(maxlen=kept)
        self._name = ""
        self._segment = 0
        self._written = 0

    def begin(self, start: Start, began: datetime | None = None) -> None:
        """Write the start of a run; a directory that cannot be written ends the file, not the planner."""
        self._name = f"planner-ticks-{(began or datetime.now(UTC)):%Y%m%dT%H%M%S.%fZ}"
        self._segment = self._written = 0
        self._write(encode(start))

    def add(self, summary: DecisionSummary, tick: Tick | None) -> None:
        """Keep a decision; `tick` is its record, None for a tick without one."""
        self._recent.append(summary)
        if tick is not None:
            self._write(encode(tick))

    def recent(self, count: int = KEPT_DECISIONS) -> list[DecisionSummary]:
        """Return the last decisions, the newest last."""
        return list(self._recent)[max(0, len(self._recent) - count) :]

    @property
    def path(self) -> Path | None:
        """File that is being written; None without a directory, or after an error."""
        return None if self._directory is None else self._directory / f"{self._name}-{self._segment:03}.jsonl"

    def _write(self, line: bytes) -> None:
        if self._directory is None:
            return
        if self._written and self._written + len(line) > self._segment_bytes:
            if self._segment + 1 >= SEGMENTS_MAX:
                logger.warning("decision log %s has reached %d segments and ends", self.path, SEGMENTS_MAX)
                self._directory = None
                return
            self._segment, self._written = self._segment + 1, 0
        path = self._directory / f"{self._name}-{self._segment:03}.jsonl"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(line)
        except OSError as error:
            logger.error("decision log ends: failed to write %s: %s", path, error.strerror)  # noqa: TRY400 - one line
            self._directory = None
        else:
            self._written += len(line)
