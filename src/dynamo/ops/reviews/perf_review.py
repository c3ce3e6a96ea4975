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

    diff: str | None = option(
        None,
        "DIFF",
        None,
        "File with a unified diff, - for the standard input, or a commit to compare with; default: --base",
    )
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
    if config.diff is None:
        return diff_from(config.base, "--base")
    try:
        return Path(config.diff).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return diff_from(config.diff, "DIFF")
    except OSError as error:
        raise ConfigError(f"DIFF {config.diff}: {error.strerror}") from None


def diff_from(base: str, setting: str) -> str:
    """Return the diff from a commit to the working tree. Raise `ConfigError` that names the setting."""
    done = run_git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
    if done.returncode:
        # Without a message, git is in a repository that lacks the commit.
        reason = " ".join(done.stderr.split()).removeprefix("fatal: ") or "no such branch or commit"
        raise ConfigError(f"{setting} {base}: {'no such file; as a commit: ' if setting == 'DIFF' else ''}{reason}")
    done = run_git("diff", "--no-color", "--no-ext-diff", "--merge-base", done.stdout.strip(), "--")
    if done.returncode:
        raise ConfigError(f"{setting} {base}: {' '.join(done.stderr.split())}")
    return done.stdout


def run_git(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run git. Raise `ConfigError` if it is missing or does not end."""
    try:
        return subprocess.run(  # noqa: S603
            ["git", *words],  # noqa: S607
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git: {error}; give a file with a diff") from None


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
        passed("hot path", f"{count} of {len(paths)} changed files: {', '.join(hot)}")
        if hot
        else skipped("hot path", f"none of the {len(paths)} changed files")
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
        rows.append(passed("benchmark", "the change contains a benchmark"))
    elif hot:
        rows.append(
            warned(
                "benchmark", "a hot path changes without a benchmark", "run the benchmark of that path before and after"
            )
        )
    else:
        rows.append(skipped("benchmark", "no hot path"))
    return rows


def as_text(found: Sequence[PerfFinding], paths: Sequence[str], rows: Sequence[CheckRow]) -> str:
    """Return the review for a terminal. Pure."""
    lines = [as_table(rows).rstrip()]
    if hot := hot_paths(paths):
        lines += ["", *(f"{area}: {', '.join(names)}" for area, names in hot.items())]
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
