"""Reports: the replay and planner reports in one directory, listed with their main numbers."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

DIRECTORY_VARIABLE = "DYN_CONSOLE_REPORTS_DIR"
REPORTS_MAX = 200
REPORT_BYTES_MAX = 32 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Names of files that are served: without directories, not hidden."""
SUFFIXES = {".json": "application/json", ".html": "text/html; charset=utf-8"}
SUMMARY = (
    "completed_requests",
    "num_requests",
    "duration_ms",
    "request_throughput_rps",
    "output_throughput_tok_s",
    "mean_ttft_ms",
    "p95_ttft_ms",
    "mean_itl_ms",
    "mean_e2e_latency_ms",
    "prefix_cache_reused_ratio",
    "goodput_rps",
    "gpu_hours",
)
"""Fields of a replay report that the list shows, where a report has them."""


class ReportEntry(msgspec.Struct):
    """One file."""

    name: str
    kind: str
    """`replay` (JSON) or `page` (HTML)."""
    modified_at: float
    bytes: int
    summary: dict[str, float]


class ReportFolder:
    """Reports of one directory."""

    def __init__(self, directory: str) -> None:
        """`directory`: empty for none."""
        self._directory = Path(directory) if directory else None

    @property
    def is_set(self) -> bool:
        """Whether a directory is configured."""
        return self._directory is not None

    def entries(self) -> list[ReportEntry]:
        """Return the reports, the newest first. Slow: reads every file, so it must not run on the loop."""
        if self._directory is None:
            return []
        found = []
        try:
            paths = [
                path for path in self._directory.iterdir() if path.suffix in SUFFIXES and NAME.fullmatch(path.name)
            ]
        except OSError:
            return []
        for path in paths:
            try:
                facts = path.stat()
            except OSError:
                continue
            kind = "replay" if path.suffix == ".json" else "page"
            found.append((facts.st_mtime, facts.st_size, kind, path))
        found.sort(key=lambda one: one[0], reverse=True)
        return [
            ReportEntry(path.name, kind, modified, size, summary_of(path) if kind == "replay" else {})
            for modified, size, kind, path in found[:REPORTS_MAX]
        ]

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return a report's content and media type; None if there is no such report."""
        if self._directory is None or not NAME.fullmatch(name):
            return None
        path = self._directory / name
        media = SUFFIXES.get(path.suffix)
        try:
            if media is None or path.stat().st_size > REPORT_BYTES_MAX:
                return None
            return path.read_bytes(), media
        except OSError:
            return None


def summary_of(path: Path) -> dict[str, float]:
    """Return the main numbers of a replay report; empty for another file."""
    try:
        if path.stat().st_size > REPORT_BYTES_MAX:
            return {}
        report: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(report, dict) and isinstance(report.get("summary"), dict):
        report = report["summary"]
    if not isinstance(report, dict):
        return {}
    numbers = {name: report.get(name) for name in SUMMARY}
    return {
        name: value for name, value in numbers.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
