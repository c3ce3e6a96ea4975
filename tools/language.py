"""Find words in the source and in the documentation that are not plain technical English.

    python tools/language.py [PATH ...]     list every finding below PATH (default: src/dynamo and the pages)
    python tools/language.py --count        print the number of findings per package and kind

Of the source, three kinds of text are checked: docstrings; strings that a user may read (log lines, errors, help texts), which
is every string literal with a space in it; and identifiers. Of Markdown pages, the text outside of code is checked. Quotations of
another system's text belong into `QUOTED`.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dynamo"

WORD_LIST = (
    "told|tells?|heard|hears?|hearer|hearing|nobody|somebody|whoever|anew|foretold|foretells?|foretell|beside|heirs?|legs?"
    "|owes|asked|asks|says|said|knows|wants|stands|strangers?|houses?|errands?"
)
NAME_LIST = "told|tell|heard|hear|said|say|asked|ask|seat|heir|leg|crew|errand|beside|rooms?|unheard|chance|strangers?"
WORDS = re.compile(rf"\b({WORD_LIST}|listens to no)\b", re.IGNORECASE)
IDENTIFIER = re.compile(rf"(?:^|_)({NAME_LIST})(?:_|$)", re.IGNORECASE)
CANDIDATE = re.compile(rf"(?:\b|_|\\[a-z])(?:{WORD_LIST}|{NAME_LIST}|listens)(?:\b|_)", re.IGNORECASE)
"""Matches in every source that has a finding; an escape such as `\\n` may precede a word."""
TEST_NAME_LIST = "nobody|somebody|whoever|wherever|elsewhere|alike|amiss|anew|stands|lies|moods?|befalls"
"""Further words that names in tests, tools and benchmarks must not contain."""
TEST_IDENTIFIER = re.compile(rf"(?:^|_)({NAME_LIST}|{TEST_NAME_LIST})(?:_|$)", re.IGNORECASE)
TEST_CANDIDATE = re.compile(rf"(?:\b|_)(?:{NAME_LIST}|{TEST_NAME_LIST})(?:\b|_)", re.IGNORECASE)
QUOTED: frozenset[str] = frozenset()
"""Strings that quote another system and are matched against its output."""

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
)
CODE = re.compile(r"^(`{3,}).*?^\1|^ {4}[^\n]*|``.+?``|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)
"""Text of a Markdown page that is not prose: fenced and indented blocks, code spans and comments."""

DOCSTRING, STRING, IDENTIFIERS, PROSE = "docstrings", "strings", "identifiers", "prose"
KINDS = (DOCSTRING, STRING, IDENTIFIERS)


@dataclass(frozen=True, slots=True)
class Finding:
    """One word at one place."""

    path: Path
    line: int
    kind: str
    word: str
    text: str

    @property
    def package(self) -> str:
        """The top-level package or module that contains the place."""
        return self.path.relative_to(SOURCE).parts[0].removesuffix(".py")


def findings(path: Path) -> Iterator[Finding]:
    """Yield every finding of one file; an identifier once per file."""
    source = path.read_text(encoding="utf-8")
    if not CANDIDATE.search(source):  # Parsing takes most of the time.
        return
    tree = ast.parse(source)
    docstrings: set[int] = set()
    seen: set[str] = set()
    for node in ast.walk(tree):
        for line, name in names_of(node):
            found = IDENTIFIER.search(name)
            if found and name not in seen:
                seen.add(name)
                yield Finding(path, line, IDENTIFIERS, found[1].lower(), name)
        body = getattr(node, "body", None)
        if isinstance(body, list):  # A string statement is a docstring, of its definition or of the attribute above it.
            docstrings |= {
                id(one.value) for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            if node.value in QUOTED:
                continue
            kind = DOCSTRING if id(node) in docstrings else STRING
            for offset, text in enumerate(node.value.splitlines()):
                for found in WORDS.finditer(text):
                    yield Finding(path, node.lineno + offset, kind, found[0].lower(), text.strip())


def prose(path: Path) -> Iterator[Finding]:
    """Yield every finding of a Markdown page."""
    text = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), path.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        for found in WORDS.finditer(line):
            yield Finding(path, number, PROSE, found[0].lower(), line.strip())


def test_names(path: Path) -> Iterator[Finding]:
    """Yield the names of a file of tests, tools or benchmarks with a listed word; each name once."""
    source = path.read_text(encoding="utf-8")
    if not TEST_CANDIDATE.search(source):
        return
    seen: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for line, name in names_of(node):
            found = TEST_IDENTIFIER.search(name)
            if found and name not in seen:
                seen.add(name)
                yield Finding(path, line, IDENTIFIERS, found[1].lower(), name)


def names_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that a node defines, with their lines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.lineno, node.name
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def below(paths: list[Path]) -> Iterator[Finding]:
    """Yield the findings of files and of folders, recursively."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from prose(file.resolve()) if file.suffix == ".md" else findings(file.resolve())


@cache
def counts() -> Counter[tuple[str, str]]:
    """Count the findings by package and kind."""
    return Counter((one.package, one.kind) for one in below([SOURCE]))


def main(argv: list[str]) -> int:
    """Print findings, or their numbers; return 0."""
    if argv == ["--count"]:
        numbers = counts()
        for package in sorted({package for package, _ in numbers}):
            print(f"{package:16}", *(f"{kind} {numbers[package, kind]:4}" for kind in KINDS))
        print(
            "total           ", *(f"{kind} {sum(n for (_, k), n in numbers.items() if k == kind):4}" for kind in KINDS)
        )
        return 0
    for one in below([Path(arg) for arg in argv] or [SOURCE, *PAGES]):
        print(f"{one.path.relative_to(ROOT)}:{one.line}: {one.kind}: {one.word}: {one.text[:120]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
