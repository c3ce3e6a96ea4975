"""Comparison: table of several runs, with differences from the first in percent."""

from collections.abc import Mapping
from typing import Any

ROWS = (
    ("mean_ttft_ms", "TTFT ms, mean", False),
    ("median_ttft_ms", "TTFT ms, p50", False),
    ("p99_ttft_ms", "TTFT ms, p99", False),
    ("mean_itl_ms", "ITL ms, mean", False),
    ("p99_itl_ms", "ITL ms, p99", False),
    ("mean_e2e_latency_ms", "latency ms, mean", False),
    ("p99_e2e_latency_ms", "latency ms, p99", False),
    ("output_throughput_tok_s", "output tok/s", True),
    ("request_throughput_rps", "requests/s", True),
    ("goodput_tok_s", "goodput tok/s", True),
    ("sla_met_ratio", "SLA attainment", True),
    ("worker_seconds", "worker-seconds", False),
    ("refused_requests", "refused requests", False),
    ("gpu_hours", "GPU-hours", False),
    ("goodput_tok_s_per_gpu", "goodput tok/s per GPU", True),
    ("scaling_events", "scaling events", False),
    ("prefix_cache_reused_ratio", "cache reuse", True),
    ("preemptions", "preemptions", False),
    ("migrations", "migrations", False),
)
"""Key, title, and whether higher is better."""


def side_by_side(summaries: Mapping[str, dict[str, Any]]) -> str:
    """Return a table with a column for each run."""
    names = list(summaries)
    first = summaries[names[0]]
    rows = [["", *names]]
    for key, title, _ in ROWS:
        if all(not summary.get(key) for summary in summaries.values()):
            continue
        cells = [title]
        for name in names:
            value = summaries[name].get(key)
            cells.append("n/a" if value is None else cell(key, value, None if name == names[0] else first.get(key)))
        rows.append(cells)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "   ".join(
            f"{text:<{width}}" if at == 0 else f"{text:>{width}}"
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


def cell(key: str, value: float, base: float | None) -> str:
    """Return a formatted number and its difference from the first run."""
    is_share = key.endswith("_ratio")
    text = f"{100 * value:.1f} %" if is_share else f"{value:,.0f}" if isinstance(value, int) else f"{value:,.2f}"
    if is_share and base is not None:
        return f"{text} ({100 * (value - base):+.1f})"  # Percentage points.
    if not base:
        return text
    return f"{text} ({100 * (value / base - 1):+.1f} %)"
