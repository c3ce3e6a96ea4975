"""Command `dynamo perf-review`: the costs that a diff adds to hot paths, as a checklist, findings and an overall impact."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.ops.clones.sites import OTHER, area_of
from dynamo.ops.report import CheckRow, as_table, passed, row_value, skipped, warned
from dynamo.ops.reviews.diff import added_lines, changed_paths
from dynamo.ops.reviews.perf_patterns import CHECKS, Impact, PerfFinding, findings, overall

GIT_S = 60.0
BENCHMARKS = ("benchmarks/", "benches/", "bench/", "perf.yaml")
VERDICTS = {
    Impact.NEGLIGIBLE: "no cost was found",
    Impact.MINOR: "acceptable; consider the fixes",
    Impact.MODERATE: "measure before merging",
    Impact.SIGNIFICANT: "change it before merging",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfReviewConfig:
    """Review the performance of a change: the added lines of a unified diff. The exit status is 0 whatever is found."""

    diff: str | None = option(None, "DIFF", None, "Unified diff, - for the standard input; default: git diff of --base")
    base: str = option("main", "--base", None, "Branch or commit that the working tree is compared with")
    json: bool = option(False, "--json", None, "Print JSON")


def perf_review(argv: Sequence[str]) -> int:
    """Run `dynamo perf-review`. Raise `ConfigError` for a text that is no diff."""
    config = load(PerfReviewConfig, argv, prog="dynamo perf-review")
    text = diff_of(config)
    found = findings(added_lines(text))
    paths = changed_paths(text)
    rows = checklist(found, paths)
    print(as_json(found, paths, rows) if config.json else as_text(found, paths, rows))
    return 0


def diff_of(config: PerfReviewConfig) -> str:
    """Return the text of the diff. Raise `ConfigError`."""
    if config.diff == "-":
        return sys.stdin.read()
    if config.diff is not None:
        try:
            return Path(config.diff).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"DIFF {config.diff}: {error.strerror}") from None
    command = ["git", "diff", "--no-color", "--no-ext-diff", "--merge-base", config.base, "--"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=GIT_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git: {error}; give a DIFF") from None
    if done.returncode:
        raise ConfigError(f"--base {config.base}: {' '.join(done.stderr.split())}")
    return done.stdout


def hot_paths(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the changed files on hot paths, by area."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if (area := area_of(path)[0]) != OTHER:
            found.setdefault(area, []).append(path)
    return found


def checklist(found: Sequence[PerfFinding], paths: Sequence[str]) -> list[CheckRow]:
    """Return a row for each question of the review. Pure."""
    hot = hot_paths(paths)
    count = sum(map(len, hot.values()))
    rows = [
        passed("hot path", f"{count} of {len(paths)} files: {', '.join(hot)}")
        if hot
        else skipped("hot path", f"none of {len(paths)} files")
    ]
    counts = Counter(one.concern for one in found)
    for concern in CHECKS:
        worst = next((one for one in found if one.concern == concern), None)
        if worst is None:
            rows.append(passed(concern, "nothing found"))
        else:
            evidence = f"{counts[concern]} lines; {worst.path}:{worst.line} ({worst.impact.value})"
            rows.append(warned(concern, evidence, worst.fix))
    if any(path.startswith(BENCHMARKS) or "/bench" in path for path in paths):
        rows.append(passed("benchmark", "the change contains one"))
    elif hot:
        rows.append(
            warned(
                "benchmark", "the change of a hot path contains none", "run the benchmark of that path before and after"
            )
        )
    else:
        rows.append(skipped("benchmark", "no hot path"))
    return rows


def as_text(found: Sequence[PerfFinding], paths: Sequence[str], rows: Sequence[CheckRow]) -> str:
    """Return the review for a terminal. Pure."""
    lines = [as_table(rows), ""]
    for area, names in hot_paths(paths).items():
        lines.append(f"{area}: {', '.join(names)}")
    for one in found:
        lines += [
            "",
            f"{one.path}:{one.line}  {one.concern} ({one.impact.value})",
            f"  {one.text}",
            f"  why: {one.why}",
            f"  fix: {one.fix}",
        ]
    impact = overall(found)
    return "\n".join([*lines, "", f"Overall impact: {impact.value}; {VERDICTS[impact]}"])


def as_json(found: Sequence[PerfFinding], paths: Sequence[str], rows: Sequence[CheckRow]) -> str:
    """Return the review as JSON. Pure."""
    impact = overall(found)
    values: list[dict[str, Any]] = [{**asdict(one), "impact": one.impact.value} for one in found]
    return json.dumps(
        {
            "impact": impact.value,
            "verdict": VERDICTS[impact],
            "hot_paths": hot_paths(paths),
            "findings": values,
            "rows": [row_value(row) for row in rows],
        },
        indent=2,
    )
