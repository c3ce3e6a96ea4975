"""Write every flag and variable of `python -m dynamo.frontend` into docs/frontend.md, between its markers."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynamo.frontend.config import UNSUPPORTED_FLAGS, FrontendConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "frontend.md"
BEGIN, END = "<!-- flags: written by tools/frontend_options.py -->", "<!-- end of flags -->"


def main() -> int:
    """Rewrite the page. With `--check`, only return 1 if it is out of date."""
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    after = f"{head}{BEGIN}\n\n{table()}\n{unsupported_flags()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def table() -> str:
    """Return the table of supported flags."""
    lines = ["| flag | variable | default | |", "|---|---|---|---|"]
    lines += [line(field) for field in fields(FrontendConfig)]
    return "\n".join(lines) + "\n"


def line(field: Any) -> str:
    metadata = field.metadata
    names = ", ".join(f"`{name}`" for name in (metadata["flag"], *metadata["aliases"]))
    variable = f"`{metadata['env']}`" if metadata["env"] else ""
    text = metadata["help"].replace("|", "\\|")
    choices = f" ({', '.join(metadata['choices'])})" if metadata["choices"] else ""
    return f"| {names} | {variable} | {default(field)} | {text}{choices} |"


def default(field: Any) -> str:
    """Return the default as text; empty if there is none."""
    if callable(field.default_factory) and field.default_factory.__name__ == "default_discovery":
        return "file, or etcd"
    value = field.default
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return {True: "on", False: "off"}.get(value, "") if isinstance(value, bool) else ""
    return f"{value}"


def unsupported_flags() -> str:
    """Return the sentence about the unsupported flags of upstream."""
    declared = {field.metadata["flag"] for field in fields(FrontendConfig)}
    names = ", ".join(f"`{one.flag}`" for one in UNSUPPORTED_FLAGS if one.flag not in declared)
    return f"Not supported, and refused unless given with upstream's default value: {names}.\n"


if __name__ == "__main__":
    sys.exit(main())
