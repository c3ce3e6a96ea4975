"""Module list: writes the captions of all packages and modules into docs/reference/modules.md."""

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "modules.md"
HEAD = """# Modules

Every package and module with the first paragraph of its docstring, from the top layer to the bottom one. Written by
`tools/architecture.py`; `make format` updates it.

"""


def main() -> int:
    """Rewrite the page; return 1 with `--check` if it was out of date."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    after = f"{HEAD}{layers()}"
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def layers() -> str:
    """Return every layer, from the top, as import-linter lists them; imports point down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    names = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = []
    for height, layer in zip(range(len(names) - 1, -1, -1), names, strict=True):
        for package in layer.split(" | "):
            folder = ROOT / "src" / "dynamo" / package
            if folder.is_dir():
                lines += [f"**{height} `{package}`** — {caption(folder / '__init__.py')}", "", *modules(folder), ""]
            else:
                lines += [f"**{height} `{package}`** — {caption(folder.with_suffix('.py'))}", ""]
    return "\n".join(lines)


def modules(package: Path) -> list[str]:
    """Return a line for each module of a package, including subpackages."""
    found = (path for path in package.rglob("*.py") if path.name != "__main__.py" and path != package / "__init__.py")
    return [f"- `{name(path, package)}` — {caption(path)}" for path in sorted(found)]


def name(path: Path, package: Path) -> str:
    """Return `http/service`; a folder ends in a slash."""
    parts = path.relative_to(package).with_suffix("").as_posix()
    return parts.removesuffix("__init__") if path.name == "__init__.py" else parts


def caption(path: Path) -> str:
    """Return the first paragraph of a module's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
