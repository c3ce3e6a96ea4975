"""Blocks: the fenced blocks of a Markdown page, their markers, and the commands of a shell block."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "examples/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
MARKER = re.compile(r"<!-- (not run|given): (.+?) -->")
FENCE = re.compile(r"(`{3,})(\w*)$")

SERVER = re.compile(
    r"-m dynamo\.(?!replay)|dynamo serve|make serve|nats-server|launch/\w+\.sh|03_parts\.sh|_worker\.py|"
    r"(hello_world|echo_model|media)/worker\.py|two_stages/(upper|entrance)\.py|cancellation/(server|middle)\.py"
)
"""Programs that run until they are stopped, with or without `&`."""
NEEDS_PORTS = re.compile(r"09_kv_routing\.sh")
"""Programs that start and stop a server themselves: the reader stops those of earlier blocks first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    """Line of the opening fence, from 1."""
    language: str
    text: str
    not_run: str | None
    """Reason why the block is not executed."""
    given: str | None
    """Prerequisite of the block, which the tests provide."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One shell command of a block, with its continuation lines."""

    text: str
    is_server: bool


def blocks(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page; a marker is an HTML comment on the line before the fence."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = next(later for later in range(number + 1, len(lines)) if lines[later] == opening[1])
        marker = MARKER.fullmatch(lines[number - 1]) if number else None
        kind = marker[1] if marker else None
        found.append(
            Block(
                page=page,
                line=number + 1,
                language=opening[2],
                text="\n".join(lines[number + 1 : end]),
                not_run=marker[2] if marker and kind == "not run" else None,
                given=marker[2] if marker and kind == "given" else None,
            )
        )
        number = end + 1
    return found


def page_blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page of this repository."""
    return blocks(page, (ROOT / page).read_text())


def commands(text: str) -> list[Command]:
    """Return the commands of a shell block: lines, joined where a backslash or an open quote continues them."""
    found: list[Command] = []
    so_far = ""
    for line in text.splitlines():
        so_far = f"{so_far}\n{line}" if so_far else line
        if so_far.endswith("\\") or not _is_complete(so_far):
            continue
        words = shlex.split(so_far, comments=True)
        if words:
            is_short = bool({"--help", "-h", "--dry-run"} & set(words)) or "-m dynamo.profiler" in so_far
            found.append(
                Command(text=so_far, is_server=words[-1] == "&" or (bool(SERVER.search(so_far)) and not is_short))
            )
        so_far = ""
    assert not so_far, f"an unfinished command: {so_far}"
    return found


def _is_complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
