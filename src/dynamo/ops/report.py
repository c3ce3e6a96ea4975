"""Report: rows with status, evidence and remedy, as a table for a terminal or as JSON. Pure."""

import enum
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynamo import __version__

INDENT = " " * 6
WIDTH_MIN = 40


class CheckStatus(enum.Enum):
    """Result of one check, in the order of severity."""

    PASS = "PASS"  # noqa: S105 - the word of the report
    SKIP = "SKIP"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Result of one check: what was seen and, if it is not as it should be, what to do."""

    check: str
    status: CheckStatus
    evidence: str
    remedy: str = ""


def passed(check: str, evidence: str) -> CheckRow:
    """Return a row for something that is as it should be."""
    return CheckRow(check, CheckStatus.PASS, evidence)


def skipped(check: str, evidence: str) -> CheckRow:
    """Return a row for something that does not apply here."""
    return CheckRow(check, CheckStatus.SKIP, evidence)


def warned(check: str, evidence: str, remedy: str) -> CheckRow:
    """Return a row for something that may cause a failure later."""
    return CheckRow(check, CheckStatus.WARN, evidence, remedy)


def failed(check: str, evidence: str, remedy: str) -> CheckRow:
    """Return a row for something that prevents serving."""
    return CheckRow(check, CheckStatus.FAIL, evidence, remedy)


def verdict(rows: Sequence[CheckRow]) -> CheckStatus:
    """Return the most severe status; PASS if every row passed or was skipped."""
    found = {row.status for row in rows}
    return next((one for one in (CheckStatus.FAIL, CheckStatus.WARN) if one in found), CheckStatus.PASS)


def exit_status(rows: Sequence[CheckRow]) -> int:
    """Return 1 if a row failed, otherwise 0."""
    return int(verdict(rows) is CheckStatus.FAIL)


def as_json(rows: Sequence[CheckRow]) -> str:
    """Return the report as JSON: version, verdict and rows."""
    return json.dumps(
        {"version": __version__, "verdict": verdict(rows).value, "rows": [row_value(row) for row in rows]}, indent=2
    )


def row_value(row: CheckRow) -> dict[str, Any]:
    """Return a row as a JSON object."""
    return {**asdict(row), "status": row.status.value}


def as_table(rows: Sequence[CheckRow], *, width: int = 100, is_colored: bool = False) -> str:
    """Return one line for each row, its remedy below it, and a summary."""
    column = max((len(row.check) for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        head = f"{_painted(row.status, is_colored)}  {row.check.ljust(column)}  "
        lines += _wrapped(row.evidence, head, " " * (column + 8), width, len("PASS") + column + 4)
        if row.remedy:
            lines += _wrapped(row.remedy, f"{INDENT}{' ' * column}  -> ", " " * (column + 11), width)
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{counts[status]} {status.value}" for status in reversed(CheckStatus) if counts[status])
    return "\n".join([*lines, "", f"{verdict(rows).value}: {summary or 'no checks'}"])


def _wrapped(text: str, head: str, indent: str, width: int, head_width: int | None = None) -> list[str]:
    """Return a text wrapped behind a head whose colours take no width."""
    columns = max(WIDTH_MIN, width - (len(head) if head_width is None else head_width))
    parts = textwrap.wrap(text, columns, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{head}{parts[0]}".rstrip(), *(f"{indent}{part}" for part in parts[1:])]


COLORS = {CheckStatus.PASS: "32", CheckStatus.SKIP: "2", CheckStatus.WARN: "33", CheckStatus.FAIL: "31"}
"""Terminal attributes of each status."""


def _painted(status: CheckStatus, is_colored: bool) -> str:
    return f"\x1b[{COLORS[status]}m{status.value}\x1b[0m" if is_colored else status.value
