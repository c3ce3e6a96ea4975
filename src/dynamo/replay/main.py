"""Main: run the replay of a command line, show progress, and write the reports."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dynamo.core.config import load
from dynamo.core.errors import CannotConnect, ConfigError
from dynamo.replay import request_trace
from dynamo.replay.comparison import side_by_side
from dynamo.replay.config import ReplayConfig
from dynamo.replay.event_stream import EventStream
from dynamo.replay.frontend import FrontendClient, Prompts, only_model
from dynamo.replay.online import Online
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.page import page
from dynamo.replay.report import as_json, report_of, rows_of, summary_of, table_of
from dynamo.replay.scenario import LoadSource

Progress = Callable[[int, float], None]

BAR = 30
REDRAW_S = 0.1
REASONS_SHOWN = 5


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay") -> int:
    """Run one command line; return 1 if requests were not answered, otherwise 0. Raise `ConfigError`."""
    config = load(ReplayConfig, argv, prog=prog)
    source = config.source()
    began_ms = 0
    runs: dict[str, tuple[RunOutcome, float]] = {}
    is_shown = config.progress and sys.stderr.isatty()
    if config.replay_mode == "online":
        began_ms = time.time_ns() // 1_000_000
        runs["online"] = _timed("online", source.requests, is_shown, lambda bar: run_online(config, source, bar))
    else:
        for name, scenario in config.scenarios(source).items():
            runs[name] = _timed(name, source.requests, is_shown, scenario.run)
    _report(config, runs)
    if config.report_trace is not None:
        first = next(iter(runs.values()))[0]
        block_tokens = source.block_tokens if config.replay_mode == "online" else config.engine().block_size
        rows = request_trace.rows_of(first, source.block_tokens, block_tokens, began_ms)
        _write(config.report_trace, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    left = sum(outcome.unfinished for outcome, _ in runs.values())
    if left:
        sys.stderr.write(f"{left} requests were not answered\n")
    for reason, count in next(iter(runs.values()))[0].failures.most_common(REASONS_SHOWN):
        sys.stderr.write(f"{count} x {reason}\n")
    return 1 if left and config.max_sim_time_ms is None else 0


def _report(config: ReplayConfig, runs: Mapping[str, tuple[RunOutcome, float]]) -> None:
    """Print the table and write the requested reports."""
    summaries = {}
    for name, (outcome, wall_ms) in runs.items():
        summaries[name] = summary_of(outcome, rows_of(outcome.flights), config.objectives())
        if config.report_json != "-":
            title = f"{name}\n" if len(runs) > 1 else ""
            print(f"{title}{table_of(summaries[name], wall_ms)}\n")
    if len(runs) > 1 and config.report_json != "-":
        print(side_by_side(summaries))
    reports = {
        name: report_of(
            outcome,
            objectives=config.objectives(),
            with_requests=config.capture_per_request,
            with_telemetry=config.telemetry,
        )
        for name, (outcome, _) in runs.items()
    }
    _write(config.report_json, as_json(next(iter(reports.values())) if len(reports) == 1 else reports))
    if config.report_jsonl:
        rows = (row for outcome, _ in runs.values() for row in rows_of(outcome.flights))
        _write(config.report_jsonl, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    if config.report_html:
        outcomes = {name: outcome for name, (outcome, _) in runs.items()}
        text = page(
            outcomes, summaries, config.described(len(next(iter(outcomes.values())).flights)), config.objectives()
        )
        _write(config.report_html, text.encode())


def run_online(config: ReplayConfig, source: LoadSource, progress: Progress | None) -> RunOutcome:
    """Send the load to a running frontend."""

    async def replay() -> RunOutcome:
        stream = EventStream(config.url, config.request_timeout_s)
        try:
            model = config.model_name or await only_model(stream)
            online = Online(
                source.load(config.replay_concurrency, config.arrival_speedup_ratio, config.agentic_lanes),
                FrontendClient(stream, model, Prompts(source.block_tokens, config.token_ids())),
                at_once=config.connections,
                time_ms=config.max_sim_time_ms,
                interval_ms=config.telemetry_interval_ms,
            )
            return await online.run(progress)
        except CannotConnect as error:
            raise ConfigError(f"--url: {error}") from None
        finally:
            stream.close()

    return asyncio.run(replay())


def _timed(
    name: str, total: int, is_shown: bool, run: Callable[[Progress | None], RunOutcome]
) -> tuple[RunOutcome, float]:
    """Return the outcome of a run and its duration in ms."""
    began = time.monotonic()
    outcome = run(_bar(name, total) if is_shown else None)
    if is_shown:
        sys.stderr.write("\r\x1b[K")
    return outcome, (time.monotonic() - began) * 1000


def _bar(name: str, total: int) -> Progress:
    """Return a function that draws a progress bar on one line."""
    began = drawn = time.monotonic()

    def draw(answered: int, now_ms: float) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < REDRAW_S:
            return
        drawn = now
        full = BAR * answered // max(1, total)
        pace = now_ms / 1000 / (now - began)
        sys.stderr.write(
            f"\r{name} {'█' * full}{'░' * (BAR - full)} {answered:,}/{total:,} requests, "
            f"{now_ms / 1000:,.0f} s, {pace:,.0f} times real time\x1b[K"
        )
        sys.stderr.flush()

    return draw


def _write(path: str | None, data: bytes) -> None:
    if path is None:
        return
    if path == "-":
        sys.stdout.write(data.decode())
        return
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
