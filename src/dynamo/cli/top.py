"""Top: `dynamo top` shows models and workers of a running frontend in the terminal, from the data of the console."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.http.client import ChatClient, environment_key
from dynamo.ops.graphs import DEFAULT_URL, server_url

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

INTERVAL_MIN_S = 0.5
"""The frontend takes a sample each second."""
SORTS = {
    "name": lambda row: (row["namespace"], row["component"], row["id"]),
    "load": lambda row: -row["in_flight"],
    "kv": lambda row: -(usage_of([row]) or 0.0),
}
"""Orders of the workers."""
STATE_STYLES = {
    "serving": "green",
    "draining": "yellow",
    "drained": "yellow",
    "stopping": "yellow",
    "unresponsive": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Show the models and workers of a running frontend: rates, latencies, load and cache."""

    url: str = option(
        DEFAULT_URL, "--url", "DYN_CHAT_URL", "URL of the server; the admin key in DYN_API_KEY is sent to it"
    )
    interval: float = option(1.0, "--interval", None, "Seconds between two readings, at least 0.5")
    once: bool = option(False, "--once", None, "Print one reading and exit; so does an output that is no terminal")
    model: str | None = option(None, "--model", None, "Show only this model and its workers")
    sort: str = option("name", "--sort", None, "Order of the workers", choices=tuple(SORTS))

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an interval that is too short."""
        if self.interval < INTERVAL_MIN_S:
            raise ConfigError(f"--interval {self.interval:g}: must be at least {INTERVAL_MIN_S}")


def top(argv: Sequence[str]) -> int:
    """Run `dynamo top` until it is interrupted. Return 1 if the server does not respond."""
    config = load(TopConfig, argv, prog="dynamo top")
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError("dynamo top requires the package rich: pip install rich") from None
    client, console = ChatClient(server_url(config.url), key=environment_key()), Console()
    try:
        if config.once or not console.is_terminal:
            return once(client, console, config)
        return follow(client, console, config)
    except ConfigError:
        raise
    except DynamoException as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def once(client: ChatClient, console: "Console", config: TopConfig) -> int:
    """Print one reading; the first call begins the sampling, so rates require a second one."""
    overview = client.overview()
    if not has_recent(overview):
        time.sleep(2.5)
        overview = client.overview()
    console.print(page(overview, config, client.url))
    return 0


def follow(client: ChatClient, console: "Console", config: TopConfig) -> int:
    """Show readings until an interrupt; a server that does not respond is shown as such."""
    from rich.live import Live
    from rich.text import Text

    overview = client.overview()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(page(overview, config, client.url), refresh=True)
            time.sleep(config.interval)
            try:
                overview = client.overview()
            except DynamoException as error:
                live.update(Text(f"{client.url}: {error}", style="red"), refresh=True)
                time.sleep(config.interval)
    return 0


def has_recent(overview: Mapping[str, Any]) -> bool:
    """Return whether the last sample is of the last seconds."""
    samples = overview["samples"]
    return bool(samples) and time.time() - float(samples[-1]["at"]) < 5.0


def page(overview: Mapping[str, Any], config: TopConfig, url: str) -> "RenderableType":
    """Return what one reading shows."""
    from rich.console import Group

    models = [one for one in overview["models"] if config.model in (None, one["name"])]
    workers = [one for one in overview["workers"] if config.model is None or config.model in one["models"]]
    workers.sort(key=SORTS[config.sort])
    sample = overview["samples"][-1] if overview["samples"] else None
    return Group(header(overview, sample, url), model_table(models, workers, sample), worker_table(workers))


def header(overview: Mapping[str, Any], sample: Mapping[str, Any] | None, url: str) -> "RenderableType":
    """Return the line about the frontend."""
    from rich.text import Text

    at = datetime.now(UTC).astimezone().strftime("%H:%M:%S")
    text = Text.assemble((f"dynamo {overview['version']}", "bold"), f"  {url}  {at}  up {age(overview['started_at'])}")
    if overview["is_draining"]:
        text.append("  draining", "yellow")
    if sample is not None:
        total = sample["total"]
        text.append(
            f"\n{number(total['requests'])} req/s  {number(total['failures'])} failed/s  {number(total['output_tokens'])} tok/s out  "
            f"{number(total['input_tokens'])} tok/s in  {number(total['in_flight'])} in flight  "
            f"TTFT p95 {milliseconds(total['ttft']['p95'])}  ITL p95 {milliseconds(total['itl']['p95'])}  KV {percent(sample['kv_usage'])}"
        )
    return text


def model_table(
    models: Sequence[Mapping[str, Any]], workers: Sequence[Mapping[str, Any]], sample: Mapping[str, Any] | None
) -> "Table":
    """Return the table of the models."""
    columns = (
        "model",
        "workers",
        "router",
        "req/s",
        "failed/s",
        "out tok/s",
        "in flight",
        "queued",
        "TTFT p50",
        "p95",
        "ITL p50",
        "p95",
        "KV",
    )
    found = table(columns, right=3)
    for one in models:
        point = {} if sample is None else sample["models"].get(one["name"], {})
        ttft, itl = point.get("ttft", {}), point.get("itl", {})
        own = [row for row in workers if one["name"] in row["models"]]
        found.add_row(
            f"[{'bold' if one['is_ready'] else 'bold red'}]{escape(one['name'])}[/]",
            " + ".join(f"{part['workers']} {part['role']}" for part in one["sets"]),
            ", ".join(dict.fromkeys(part["router_mode"] for part in one["sets"])),
            *(
                number(point.get(name, 0.0))
                for name in ("requests", "failures", "output_tokens", "in_flight", "queued")
            ),
            *(milliseconds(values.get(share)) for values in (ttft, itl) for share in ("p50", "p95")),
            percent(usage_of(own)),
        )
    return found


def worker_table(workers: Sequence[Mapping[str, Any]]) -> "Table":
    """Return the table of the workers."""
    columns = (
        "worker",
        "component",
        "state",
        "role",
        "engine",
        "in flight",
        "waiting",
        "prefill tok",
        "KV",
        "cached",
        "up",
        "last error",
    )
    found = table(columns, right=5, last_left=True)
    for row in workers:
        error = row["control_error"] or (row["last_error"] or {}).get("message", "")
        style = STATE_STYLES.get(row["state"], "white")
        found.add_row(
            row["id"],
            escape(f"{row['namespace']}.{row['component']}"),
            f"[{style}]{row['state']}[/]",
            row["role"],
            escape(row["engine"] or "-"),
            str(row["in_flight"]),
            *(number(total(row, name)) for name in ("waiting", "prefill_tokens")),
            percent(usage_of([row])),
            number(total(row, "cached_blocks")),
            age(row["started_at"]),
            f"[red]{escape(error[:60])}[/]" if error else "",
        )
    return found


def table(columns: Sequence[str], right: int, *, last_left: bool = False) -> "Table":
    """Return an empty table whose columns from `right` on are right-aligned, except the last one with `last_left`."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for place, name in enumerate(columns):
        is_left = place < right or (last_left and place == len(columns) - 1)
        found.add_column(name, justify="left" if is_left else "right", no_wrap=True)
    return found


def escape(text: str) -> str:
    """Return text whose brackets are not markup."""
    from rich.markup import escape as escaped

    return escaped(text)


def total(row: Mapping[str, Any], name: str) -> float | None:
    """Return the sum of a number over a worker's ranks; None if no rank reports it."""
    known = [rank[name] for rank in row["ranks"] if rank[name] is not None]
    return sum(known) if known else None


def usage_of(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of KV blocks in use of several workers; None if unknown."""
    known = [rank for row in rows for rank in row["ranks"] if rank["kv_total"] and rank["kv_used"] is not None]
    blocks = sum(rank["kv_total"] for rank in known)
    return sum(rank["kv_used"] for rank in known) / blocks if blocks else None


def number(value: float | None) -> str:
    """Format a count or a rate."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def milliseconds(value: float | None) -> str:
    """Format a latency."""
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.1f} ms"


def percent(share: float | None) -> str:
    """Format a share."""
    return "-" if share is None else f"{share:.0%}"


def age(since: float | None) -> str:
    """Format the time since a moment in seconds since the epoch."""
    if since is None:
        return "-"
    seconds = max(0.0, time.time() - since)
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
