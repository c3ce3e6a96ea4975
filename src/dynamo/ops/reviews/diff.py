"""Unified diffs: the added lines of each file, with their numbers and what the hunk shows around them. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo.core.errors import ConfigError

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")
LINES_MAX = 200_000
TAB = 4
CONTEXT = 200
"""Lines before an added one that are kept."""


@dataclass(frozen=True, slots=True)
class AddedLine:
    """One added line."""

    path: str
    number: int
    text: str
    before: tuple[str, ...]
    """The heading of the hunk and the new lines before this one in it, the nearest last."""

    @property
    def enclosing(self) -> Iterator[str]:
        """Yield the lines that enclose this one, the innermost first, by their indentation."""
        limit = indent(self.text)
        for line in reversed(self.before):
            if line.strip() and (depth := indent(line)) < limit:
                limit = depth
                yield line.strip()


def indent(text: str) -> int:
    """Return the width of the indentation."""
    expanded = text.expandtabs(TAB)
    return len(expanded) - len(expanded.lstrip())


def added_lines(text: str) -> list[AddedLine]:
    """Return the added lines of a diff. Raise `ConfigError` for a text that is none."""
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise ConfigError(f"the diff has {len(lines)} lines: must be at most {LINES_MAX}")
    found = list(_added(lines))
    if not found and text.strip() and not any(line.startswith(("diff ", "--- ", "+++ ")) for line in lines):
        raise ConfigError("not a unified diff; make one with: git diff BASE")
    return found


def changed_paths(text: str) -> list[str]:
    """Return the files that a diff changes, without those that it deletes."""
    return sorted({path for path, _, _, _ in _lines(text.splitlines()) if path != "/dev/null"})


def _added(lines: Sequence[str]) -> Iterator[AddedLine]:
    context: list[str] = []
    for path, number, line, heading in _lines(lines):
        if line is None:
            context = [heading] if heading else []
        elif line.startswith("+"):
            yield AddedLine(path, number, line[1:], tuple(context[-CONTEXT:]))
            context.append(line[1:])
        elif not line.startswith(("-", "\\")):
            context.append(line[1:])


def _lines(lines: Sequence[str]) -> Iterator[tuple[str, int, str | None, str]]:
    """Yield path, number in the new file, and text of each line of the hunks; None as text for the start of a hunk.

    The lengths in a hunk's header separate its lines from the headers of files.
    """
    path, number, old, new = "", 0, 0, 0
    for line in lines:
        if old <= 0 and new <= 0:
            if line.startswith("+++ "):
                path = line[4:].split("\t")[0].removeprefix("b/")
            elif match := HUNK.match(line):
                number = int(match[2])
                old, new = (1 if size is None else int(size) for size in (match[1], match[3]))
                yield path, number, None, match[4].strip()
            continue
        yield path, number, line, ""
        is_added, is_removed = line.startswith("+"), line.startswith("-")
        if not line.startswith("\\"):
            old -= not is_added
            new -= not is_removed
            number += not is_removed
