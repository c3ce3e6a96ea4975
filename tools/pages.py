"""Write a generated page, or with `--check` report whether it is out of date."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"


def write(page: Path, content: str) -> int:
    """Rewrite a page; with `--check` in the command line only return 1 if it is out of date."""
    if "--check" in sys.argv[1:]:
        return int(page.read_text(encoding="utf-8") != content)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(content, encoding="utf-8")
    return 0


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cell(text: str) -> str:
    """Return a text as a cell of a table, in one line."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text in code style; an empty one stays empty."""
    return f"`{cell(text)}`" if text else ""
