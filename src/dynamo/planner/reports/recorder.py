"""Report recorder: the snapshots since the last report, the report files, and the live dashboard."""

import asyncio
import gzip
import importlib.util
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.reports.charts import MISSING, page
from dynamo.planner.reports.snapshots import SnapshotHistory, TickSnapshot, log_rows
from dynamo.runtime.json_service import HttpCall, JsonRoutes, TextBody

logger = logging.getLogger(__name__)

HTML_TYPE = "text/html; charset=utf-8"
REFRESH_S = 30
NO_DATA = (
    "<html><head><meta http-equiv='refresh' content='5'></head><body><h3>Planner Live Dashboard</h3>"
    "<p>No tick yet: this page reloads.</p></body></html>"
)


class ReportRecorder:
    """Reports of one planner. One owner; charts are drawn in a thread, one at a time."""

    def __init__(self, config: PlannerConfig, history: SnapshotHistory | None = None) -> None:
        self._config = config
        self._history = history or SnapshotHistory()
        self._interval_s = None if config.report_interval_hours is None else config.report_interval_hours * 3600
        self._began_s: float | None = None
        self._count = 0
        self._drawing = asyncio.Lock()
        self.max_kv_tokens: int | None = None
        if self.is_enabled and importlib.util.find_spec("plotly") is None:
            logger.warning(MISSING)

    @property
    def is_enabled(self) -> bool:
        """Whether the settings have reports or the dashboard."""
        return self._interval_s is not None or self._config.live_dashboard_port > 0

    async def record(self, snapshot: TickSnapshot) -> str | None:
        """Add a snapshot; return the path of the report that was due."""
        if not self.is_enabled:
            return None
        self._history.add(snapshot)
        if self._began_s is None:
            self._began_s = snapshot.timestamp_s
        is_due = self._interval_s is not None and snapshot.timestamp_s - self._began_s >= self._interval_s
        return await self.write() if is_due else None

    async def close(self) -> None:
        """Write the last report."""
        if self._interval_s is not None:
            await self.write()

    async def write(self) -> str | None:
        """Write a report of the snapshots since the last one; return its path, None without snapshots or after an error."""
        snapshots = self._history.all()
        if not snapshots:
            return None
        self._history.clear()
        self._count += 1
        self._began_s = snapshots[-1].timestamp_s
        path = Path(self._config.report_output_dir) / (self._config.report_filename or self._name(snapshots[-1]))
        async with self._drawing:
            try:
                await asyncio.to_thread(self._write_files, path, snapshots)
            except OSError as error:
                logger.error("failed to write report %s: %s", path, error.strerror or error)  # noqa: TRY400 - one line
                return None
        return str(path)

    async def live_page(self) -> str:
        """Return the page of the snapshots since the last report."""
        async with self._drawing:
            snapshots = self._history.all()
            if not snapshots:
                return NO_DATA
            try:
                html = await asyncio.to_thread(page, snapshots, self._config, self.max_kv_tokens)
            except ConfigError as error:
                return f"<html><body><h3>Planner Live Dashboard</h3><p>{error}</p></body></html>"
        return html.replace("<head>", f'<head><meta http-equiv="refresh" content="{REFRESH_S}">', 1)

    def routes(self) -> JsonRoutes:
        """Return the routes of `live_dashboard_port`."""
        routes = JsonRoutes()

        async def get(call: HttpCall[None]) -> tuple[int, TextBody]:
            return 200, TextBody(await self.live_page(), HTML_TYPE)

        routes.add("GET", "/", get)
        return routes

    def _name(self, last: TickSnapshot) -> str:
        return f"planner_report_{datetime.fromtimestamp(last.timestamp_s, UTC):%Y%m%d_%H%M%S}_{self._count:03d}.html"

    def _write_files(self, path: Path, snapshots: Sequence[TickSnapshot]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._config.report_write_gzip_log:
            log = log_path(path)
            write_log(log, self._config, snapshots, path)
            logger.info("report log written: %s", log)
        try:
            html = page(snapshots, self._config, self.max_kv_tokens)
        except ConfigError:  # The recorder has logged that the extra is missing.
            return
        path.write_text(html, encoding="utf-8")
        logger.info("report written: %s", path)


def log_path(report: Path) -> Path:
    """Return the path of a report's log."""
    name = report.name[:-5] if report.name.lower().endswith(".html") else report.name
    return report.with_name(f"{name}.log.jsonl.gz")


def write_log(path: Path, config: PlannerConfig, snapshots: Sequence[TickSnapshot], report: Path) -> None:
    """Write the snapshots as JSON lines with sorted keys. Raise `OSError`."""
    rows = log_rows(config, list(snapshots), str(report), datetime.now(UTC))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False, separators=(",", ":"), sort_keys=True) + "\n")
