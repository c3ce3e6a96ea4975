"""Write the environment variables into docs/reference/variables.md: those of flags, and those that modules read by themselves."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.flags_page import configurations, options
from tools.known_variables import names_in
from tools.pages import REFERENCE, ROOT, cell, code, table, write

from dynamo.core.known_variables import KNOWN

PAGE = REFERENCE / "variables.md"
SOURCE = ROOT / "src" / "dynamo"
PAGES = sorted((ROOT / "docs").glob("*.md"))
HEAD = """# Environment variables

Every variable that the programs read. Values of boolean variables: `1`, `true`, `yes`, `on` or `enabled`; `0`, `false`, `no`, `off`,
`disabled` or nothing. An unknown variable that begins with `DYN_` is reported in the log. Some belong to flags of upstream
that are not supported: other values than upstream's default are refused. Written by `tools/variables_page.py`; `make references`
updates it.

"""


def main() -> int:
    """Rewrite the page."""
    return write(PAGE, content())


def content() -> str:
    """Return the page."""
    flags: dict[str, str] = {}
    for config in configurations().values():
        for _, field in options(config):
            if field.metadata["env"]:
                flags.setdefault(field.metadata["env"], field.metadata["flag"])
    others = dict(settings())
    readers = readers_of_names()
    others |= {name: ("", readers.get(name, "")) for name in KNOWN if name not in others}
    rows = [(code(name), *others[name], described(name)) for name in sorted(others) if name not in flags]
    with_flag = [(code(name), code(flag)) for name, flag in sorted(flags.items())]
    return (
        f"{HEAD}## Variables without a flag\n\n"
        + table(("variable", "default", "module", "described in"), rows)
        + "\n## Variables of flags\n\n[Flags](flags.md) describes them.\n\n"
        + table(("variable", "flag"), with_flag)
    )


@cache
def settings() -> dict[str, tuple[str, str]]:
    """Return the default and the module of every variable that is read by `setting()`."""
    found: dict[str, tuple[str, str]] = {}
    for path, text in sources("setting("):
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name(id="setting"), args=[ast.Constant(value=str(name)), default, *_]):
                    module = path.relative_to(SOURCE).with_suffix("").as_posix()
                    found.setdefault(name, (shown(default), code(module)))
    return found


def readers_of_names() -> dict[str, str]:
    """Return the first module that names each variable."""
    found: dict[str, str] = {}
    for path, text in sources("DYN_"):
        if path.name != "known_variables.py":
            for name in names_in(text):
                found.setdefault(name, code(path.relative_to(SOURCE).with_suffix("").as_posix()))
    return found


def sources(word: str) -> Iterator[tuple[Path, str]]:
    """Yield the modules that contain a word, with their text."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if word in text:
            yield path, text


def shown(default: ast.expr) -> str:
    """Return a literal default; empty for one that is computed or none."""
    match default:
        case ast.Constant(value=bool(value)):
            return "on" if value else "off"
        case ast.Constant(value=str() | int() | float() as value):
            return code(cell(str(value)))
    return ""


def described(name: str) -> str:
    """Return links to the first pages that name a variable."""
    pages = [page for page in PAGES if f"`{name}`" in page.read_text(encoding="utf-8")]
    return ", ".join(f"[{page.stem}](../{page.name})" for page in pages[:2])


if __name__ == "__main__":
    sys.exit(main())
