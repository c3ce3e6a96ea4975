"""Records of contributors: `dynamo worklog` for a debugging session, `dynamo proposal` for an enhancement. They write local files only."""

import json
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo import __version__
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError

STATUSES = ("investigating", "root-caused", "fixed", "wontfix")
KINDS = ("lightweight", "full", "plan", "retroactive")
STATES = ("Draft", "Under Review", "Accepted", "Rejected", "Deferred", "Implemented", "Replaced")
LABELS = {
    "Draft": "dep:draft",
    "Under Review": "dep:under-review",
    "Accepted": "dep:approved",
    "Implemented": "dep:done",
}
LOG_HEADING = "## Investigation Log"
SLUG_MAX = 60
WORKLOG_HELP = """\
dynamo worklog: the record of a debugging session, in one Markdown file

  dynamo worklog new SUBJECT                       write SUBJECT.md; SUBJECT is an issue number, its URL or a description
  dynamo worklog log FILE --hypothesis TEXT        append before an experiment
  dynamo worklog log FILE --test TEXT --result TEXT  append after it
  dynamo worklog status FILE --status STATUS       investigating, root-caused, fixed or wontfix
"""
PROPOSAL_HELP = """\
dynamo proposal: an enhancement proposal as Markdown and its labels; nothing is published

  dynamo proposal new TITLE --kind lightweight|full|plan|retroactive
  dynamo proposal update FILE --state STATE        Draft, Under Review, Accepted, Rejected, Deferred, Implemented or Replaced
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorklogConfig:
    """Write the record of a debugging session."""

    subject: str | None = option(None, "SUBJECT", None, "Issue number, URL or description; for log and status the file")
    hypothesis: str | None = option(None, "--hypothesis", None, "What is assumed")
    test: str | None = option(None, "--test", None, "What was done")
    result: str | None = option(None, "--result", None, "What was seen")
    status: str | None = option(None, "--status", None, "State of the session", choices=STATUSES)
    output: str = option(".", "--output", None, "Directory of the new file")
    json: bool = option(False, "--json", None, "Print JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalConfig:
    """Write an enhancement proposal."""

    subject: str | None = option(None, "SUBJECT", None, "Title; for update the file")
    kind: str = option("lightweight", "--kind", None, "Kind of the proposal", choices=KINDS)
    number: int = option(0, "--number", None, "Number of the proposal, 0 while it has none")
    area: list[str] = option([], "--area", None, "Areas, which become labels")
    author: str = option("", "--author", None, "Authors")
    summary: str = option("", "--summary", None, "Text of the summary")
    state: str | None = option(None, "--state", None, "State of the proposal", choices=STATES)
    output: str = option(".", "--output", None, "Directory of the new file")
    json: bool = option(False, "--json", None, "Print JSON")


def worklog(argv: Sequence[str]) -> int:
    """Run `dynamo worklog`. Raise `ConfigError` for wrong options."""
    word, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if word in {"--help", "-h", "help"}:
        print(WORKLOG_HELP, end="")
        return 0
    if word not in {"new", "log", "status"}:
        raise ConfigError(f"unknown command dynamo worklog {word}: expected one of new, log, status")
    config = load(WorklogConfig, rest, prog=f"dynamo worklog {word}")
    subject = _named(config.subject, "SUBJECT" if word == "new" else "FILE")
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if word == "new":
        return _done(_create(Path(config.output) / f"{slug(subject)}.md", worklog_text(subject, now)), [], config.json)
    path = Path(subject)
    text = _read(path)
    if word == "status":
        changed = replaced(text, "Status", _named(config.status, "--status"))
    else:
        parts = {"Hypothesis": config.hypothesis, "Test": config.test, "Result": config.result}
        if not any(parts.values()):
            raise ConfigError("--hypothesis, --test or --result: expected at least one")
        changed = with_entry(text, now, {name: value for name, value in parts.items() if value})
    return _done(_write(path, changed), [], config.json)


def proposal(argv: Sequence[str]) -> int:
    """Run `dynamo proposal`. Raise `ConfigError` for wrong options."""
    word, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if word in {"--help", "-h", "help"}:
        print(PROPOSAL_HELP, end="")
        return 0
    if word not in {"new", "update"}:
        raise ConfigError(f"unknown command dynamo proposal {word}: expected new or update")
    config = load(ProposalConfig, rest, prog=f"dynamo proposal {word}")
    subject = _named(config.subject, "TITLE" if word == "new" else "FILE")
    state = config.state or "Draft"
    areas = config.area
    if word == "new":
        name = f"{config.number:04d}-{slug(subject)}.md"
        path = _create(Path(config.output) / name, proposal_text(subject, config, state))
    else:
        path = Path(subject)
        text = _read(path)
        areas = areas or areas_of(text)
        _write(path, replaced(text, "**Status**", _named(config.state, "--state")))
    labels = {"dep", LABELS.get(state, "dep"), *(f"area:{one}" for one in areas)}
    return _done(path, sorted(labels), config.json)


def areas_of(text: str) -> list[str]:
    """Return the areas that own a proposal, from its header. Pure."""
    found = re.search(r"(?m)^\*\*Owning SIG\*\*:(.*)$", text)
    return [one.strip() for one in found[1].split(",") if one.strip()] if found else []


def slug(text: str) -> str:
    """Return a file name for a title; of an issue's URL its number. Pure."""
    if match := re.search(r"/(?:issues|pull)/(\d+)", text):
        return f"issue-{match[1]}"
    if text.lstrip("#").isdigit():
        return f"issue-{text.lstrip('#')}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:SLUG_MAX].strip("-") or "untitled"


def worklog_text(subject: str, now: str) -> str:
    """Return a new work log. Pure but for the names of the machine."""
    source = subject if re.match(r"https?://|#?\d+$", subject) else "description"
    environment = f"dynamo {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"""\
# {subject}

Date: {now}
Source: {source}
Status: investigating

## Environment

{environment}

## Problem

## Reproduction Steps

## Expected vs Actual

{LOG_HEADING}

Append before and after each experiment.

## Root Cause

## Fix
"""


def with_entry(text: str, now: str, parts: dict[str, str]) -> str:
    """Return a work log with an entry at the end of its log. Raise `ConfigError` without that section. Pure."""
    head, found, rest = text.partition(f"{LOG_HEADING}\n")
    if not found:
        raise ConfigError(f"the file has no section {LOG_HEADING!r}")
    body, next_heading, tail = rest.partition("\n## ")
    entry = "\n".join([f"### {now}", "", *(f"- {name}: {value}" for name, value in parts.items())])
    return f"{head}{found}{body.rstrip()}\n\n{entry}\n{next_heading}{tail}"


def replaced(text: str, field: str, value: str) -> str:
    """Return a text whose line `FIELD: …` has a value. Raise `ConfigError` without that line. Pure."""
    changed, count = re.subn(rf"(?m)^({re.escape(field)}:).*$", lambda found: f"{found[1]} {value}", text, count=1)
    if not count:
        raise ConfigError(f"the file has no line {field}:")
    return changed


def proposal_text(title: str, config: ProposalConfig, state: str) -> str:
    """Return a new proposal. Pure."""
    header = {
        "Status": state,
        "Category": config.kind,
        "Owning SIG": ", ".join(config.area),
        "Authors": config.author,
        "Sponsor": "",
        "Required Reviewers": "",
        "Review Date": "",
        "Tracking Issue": "",
        "Pull Request": "",
    }
    lines = [f"# {title}", "", *(f"**{name}**: {value}".rstrip() for name, value in header.items())]
    for section in SECTIONS[config.kind]:
        lines += ["", section]
        if section == "## Summary" and config.summary:
            lines += ["", config.summary]
        if section == "## Requirements":
            lines += ["", "### REQ 1", "", "The system MUST …"]
    return "\n".join(lines) + "\n"


SECTIONS = {
    "lightweight": ("## Summary", "## Motivation", "## Proposal", "## Alternate solutions"),
    "full": (
        "## Summary", "## Motivation", "### Goals", "### Non Goals", "## Requirements", "## Proposal", "## Implementation details",
        "### Phases", "## Related proposals", "## Alternate solutions", "## Background",
    ),
    "plan": ("## Summary", "## Requirements", "## Implementation details", "### Phases", "### Validation"),
    "retroactive": ("## Summary", "## Motivation", "## What was built", "## Decisions", "## Alternate solutions", "## Open points"),
}  # fmt: skip


def _named(value: str | None, name: str) -> str:
    if not value:
        raise ConfigError(f"{name}: missing")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _create(path: Path, text: str) -> Path:
    if path.exists():
        raise ConfigError(f"{path}: exists already")
    return _write(path, text)


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return path


def _done(path: Path, labels: list[str], is_json: bool) -> int:
    if is_json:
        print(json.dumps({"file": str(path), "labels": labels}))
    else:
        print(f"{path}{f' (labels: {chr(44).join(labels)})' if labels else ''}")
    return 0
