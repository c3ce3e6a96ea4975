"""Write docs/reference/upstream-tests.md: the tests inside the released package, and how many of them pass here.

    python -m tools.upstream_page [RESULTS.json ...]

Results are those of `python -m tools.upstream_tests --json`; they are merged into tests/conformance/upstream_tests.json.
Without them only the page is written. Reasons of files that pass fewer tests here are in
tests/conformance/upstream_tests_reasons.json, by a pattern of the file; every such file needs one.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tools.pages import REFERENCE, ROOT, cell, table, write

PAGE = REFERENCE / "upstream-tests.md"
COUNTS = ROOT / "tests" / "conformance" / "upstream_tests.json"
REASONS = ROOT / "tests" / "conformance" / "upstream_tests_reasons.json"
NEVER = "Files of which no test passes in either, because they import an engine or a package that is not published: "
HEAD = """# Upstream's tests

The released 1.6.1 contains its unit tests. `python -m tools.upstream_tests DIRECTORY` runs them with the released package and with this one
in its place, in environments with the same libraries and without an engine or a GPU. `lib` and `tests` are of upstream's repository: its
bindings' tests and its end-to-end tests with mockers, in a version shortly before the release, with real etcd and NATS servers. Packages that this one does not have (`kv_dc_relay`,
`profiler`, `squeeze_evolve`, `thunderagent_router`, `tokenspeed`, `triton`) are upstream's own code on this package's runtime. The tables
have the tests that pass in each file. They are written by `tools/upstream_page.py`; `tests/conformance/test_upstream_tests.py` runs some.

"""


class Passed(NamedTuple):
    """Numbers of tests of a file that pass."""

    released: int
    ours: int


def main() -> int:
    """Merge the results of the command line, and write the page."""
    counts = dict(read())
    paths = [path for path in sys.argv[1:] if path.endswith(".json")]
    for path in paths:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        counts |= {name: Passed(*(one[runner]["passed"] for runner in Passed._fields)) for name, one in found.items()}
    if paths:
        lines = ",\n ".join(f"{json.dumps(name)}: {list(counts[name])}" for name in sorted(counts))
        COUNTS.write_text(f"{{\n {lines}\n}}\n", encoding="utf-8")
        read.cache_clear()
    for name in unexplained():
        print(f"no reason for {name}: {counts[name].ours} of {counts[name].released} pass", file=sys.stderr)
    return write(PAGE, content())


@cache
def read() -> Mapping[str, Passed]:
    """Return the committed counts by file."""
    if not COUNTS.exists():
        return {}
    return {name: Passed(*counts) for name, counts in json.loads(COUNTS.read_text(encoding="utf-8")).items()}


@cache
def reasons() -> Mapping[str, str]:
    """Return the reasons by pattern."""
    found: dict[str, str] = json.loads(REASONS.read_text(encoding="utf-8"))
    return found


def reason(name: str) -> str:
    """Return why a file passes fewer tests here; empty if none is given."""
    return next((text for pattern, text in reasons().items() if fnmatchcase(name, pattern)), "")


def fewer() -> Iterator[str]:
    """Yield the files of which fewer tests pass here."""
    yield from (name for name, passed in read().items() if passed.ours < passed.released)


def unexplained() -> list[str]:
    """Return the files of which fewer tests pass here, without a reason."""
    return [name for name in fewer() if not reason(name)]


def unused_patterns() -> list[str]:
    """Return the reasons that apply to no file."""
    names = list(fewer())
    return [pattern for pattern in reasons() if not any(fnmatchcase(name, pattern) for name in names)]


def content() -> str:
    """Return the page: the sums, then the files of each package."""
    rows = {name: passed for name, passed in read().items() if passed != (0, 0)}
    packages = {
        package: list(names) for package, names in groupby(sorted(rows), key=lambda name: name.partition("/")[0])
    }
    sums = [
        (f"[{package}](#{package})", str(total(rows, names).released), str(total(rows, names).ours))
        for package, names in packages.items()
    ]
    both = total(rows, list(rows))
    sections = [HEAD, table(("package", "released", "here"), [*sums, ("all", str(both.released), str(both.ours))])]
    never = len(read()) - len(rows)
    sections.append(f"\n{NEVER}{never}.\n")
    for package, names in packages.items():
        sections += [f"\n## {package}\n\n", table(("file", "released", "here", "difference"), map(row, names))]
    return "".join(sections)


def total(rows: Mapping[str, Passed], names: list[str]) -> Passed:
    """Return the sums of some files."""
    return Passed(sum(rows[name].released for name in names), sum(rows[name].ours for name in names))


def row(name: str) -> tuple[str, str, str, str]:
    """Return the row of a file."""
    passed = read()[name]
    why = reason(name) if passed.ours < passed.released else ""
    return f"`{name}`", str(passed.released), str(passed.ours), cell(why)


if __name__ == "__main__":
    sys.exit(main())
