"""Known variables: write the names of all DYN_ variables that the source reads into dynamo/core/known_variables.py."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "dynamo"
PAGE = SOURCE / "core" / "known_variables.py"
BEGIN, END = "    # names: written by tools/known_variables.py\n", "    # end of names\n"
NAME = re.compile(r"DYN_[A-Z0-9_]*[A-Z0-9]")
PREFIX = re.compile(r"DYN_[A-Z0-9_]*_")
PART = re.compile(r"[A-Z][A-Z0-9_]*[A-Z0-9]")


def names() -> list[str]:
    """Return the names in the source, sorted."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path != PAGE:
            found.update(names_in(path.read_text(encoding="utf-8")))
    return sorted(found)


def names_in(source: str) -> Iterator[str]:
    """Yield names that are string literals, and those that a module composes of a prefix and an argument of a call."""
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value
    prefixes = {prefix for node in nodes if isinstance(node, ast.JoinedStr) and (prefix := prefix_of(node))}
    parts = {
        argument.value
        for node in nodes
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and PART.fullmatch(argument.value)
    }
    yield from (f"{prefix}{part}" for prefix in prefixes for part in parts if not part.startswith(("DYN_", "KVBM_")))


def prefix_of(node: ast.JoinedStr) -> str | None:
    """Return `DYN_X_` of a string like f"DYN_X_{name}"."""
    match node.values:
        case [ast.Constant(value=str(prefix)), ast.FormattedValue()] if PREFIX.fullmatch(prefix):
            return prefix
    return None


def page(text: str) -> str:
    """Return the module's text with its list of names brought up to date."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + "".join(f'    "{name}",\n' for name in names()) + END + tail


def main() -> None:
    """Write the list."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {len(names())} names\n")


if __name__ == "__main__":
    main()
