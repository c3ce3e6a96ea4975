"""Signatures: known failures, each with its evidence in a case, its likely cause and the next command. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.ops.report import CheckRow, CheckStatus
from dynamo.ops.troubleshoot.case import CaseFacts

LINES_MAX = 3  # Evidence lines that are shown; the first of each source are enough to find the rest.
LINE_CHARS_MAX = 240
SEARCHED_CHARS = 4096  # Of a line; longer ones are dumps, and patterns take quadratic time on them.
LEVEL_CHARS = 80  # A line's level is in its prefix: time, process and level.
INFORMATIONAL = re.compile(r"\b(?:INFO|DEBUG|TRACE)\b")
CONTEXT_CHARS = 60  # Characters before the match that are kept of a long line.


class EvidenceLine(NamedTuple):
    """One line or object that shows the failure."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A known failure."""

    name: str
    cause: str
    command: str
    """What to do next: a command, or the setting to change."""
    pattern: re.Pattern[str] | None = None
    """Line of a log, an event or a description."""
    find: Callable[[CaseFacts], Iterable[EvidenceLine]] | None = None
    """Search in objects, records and metrics."""
    status: CheckStatus = CheckStatus.FAIL
    is_symptom: bool = False
    """Whether it is the effect of another failure, which is listed before it."""


@dataclass(frozen=True, slots=True)
class SignatureMatch:
    """A signature with its evidence."""

    signature: Signature
    lines: tuple[EvidenceLine, ...]
    count: int = field(default=1)
    """Number of matching lines, of which `lines` are the first."""

    @property
    def row(self) -> CheckRow:
        """Return the row of the report."""
        more = f" (and {self.count - len(self.lines)} more)" if self.count > len(self.lines) else ""
        evidence = "; ".join(map(str, self.lines)) + more
        remedy = f"{self.signature.cause}. Next: {self.signature.command}"
        return CheckRow(self.signature.name, self.signature.status, evidence, remedy)


def matches(case: CaseFacts, signatures: Sequence[Signature]) -> list[SignatureMatch]:
    """Return the signatures that apply: causes before symptoms, failures before warnings, then in the given order.

    Lines of informational levels are searched for warnings only, which also keeps the search of large logs short.
    """
    lines = [(source, line, is_informational(line)) for source, line in dict.fromkeys(texts(case))]
    reports = [(source, line) for source, line, is_quiet in lines if not is_quiet]
    everything = [(source, line) for source, line, _ in lines]
    found = []
    for one in signatures:
        searched = reports if one.status is CheckStatus.FAIL else everything
        own = list(dict.fromkeys(evidence(case, one, searched)))
        if own:
            found.append(SignatureMatch(one, shown(own), len(own)))
    return sorted(found, key=lambda match: (match.signature.is_symptom, match.signature.status is not CheckStatus.FAIL))


def evidence(case: CaseFacts, signature: Signature, lines: Iterable[tuple[str, str]]) -> Iterator[EvidenceLine]:
    """Yield the objects of the case and those of the lines that show a failure."""
    if signature.find is not None:
        yield from signature.find(case)
    if signature.pattern is not None:
        for source, line in lines:
            match = signature.pattern.search(line)
            if match:
                yield EvidenceLine(source, excerpt(line, match.start()))


def signature_table(signatures: Iterable[Signature]) -> str:
    """Return the signatures as a Markdown table, for the page of the skill."""
    rows = [(f"`{one.name}`", one.cause, one.command) for one in signatures]
    lines = [
        " | ".join(cell.replace("|", "\\|") for cell in row) for row in [("signature", "likely cause", "next"), *rows]
    ]
    return "\n".join([f"| {lines[0]} |", "|---|---|---|", *(f"| {line} |" for line in lines[1:])]) + "\n"


def is_informational(line: str) -> bool:
    """Return whether a log line reports no failure by its own level, such as a refused request of a client."""
    return INFORMATIONAL.search(line[:LEVEL_CHARS]) is not None


def texts(case: CaseFacts) -> Iterator[tuple[str, str]]:
    """Yield source and line of logs, and the messages of events."""
    for source, text in case.logs.items():
        for line in text.splitlines():
            if line:
                yield source, line[:SEARCHED_CHARS]
    for event in case.open_events:
        subject = event.get("involvedObject") or event.get("regarding") or {}
        where = f"event of {subject.get('kind', 'object')} {subject.get('name', '')}".rstrip()
        yield where, f"{event.get('reason') or ''}: {event.get('message') or event.get('note') or ''}"


def shown(lines: Sequence[EvidenceLine]) -> tuple[EvidenceLine, ...]:
    """Return the lines to show: the first of each source, then the next ones."""
    firsts = list({line.source: line for line in reversed(lines)}.values())
    ordered = [line for line in lines if line in firsts] + [line for line in lines if line not in firsts]
    return tuple(ordered[:LINES_MAX])


def excerpt(line: str, at: int) -> str:
    """Return a line, shortened around the position of the match."""
    text = line.strip()
    if len(text) <= LINE_CHARS_MAX:
        return text
    begin = max(0, min(at - CONTEXT_CHARS, len(line) - LINE_CHARS_MAX))
    part = line[begin : begin + LINE_CHARS_MAX].strip()
    return f"{'…' if begin else ''}{part}{'…' if begin + LINE_CHARS_MAX < len(line) else ''}"
