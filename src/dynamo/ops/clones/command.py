"""Command line of `clone_inventory.py`: scans sources and prints the ranked sites with totals. It reads only."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.core.progress import activity
from dynamo.ops.clones.python import python_sites
from dynamo.ops.clones.rust import rust_sites
from dynamo.ops.clones.sites import AREAS, HINTS, PYTHON_HINTS, CloneSite, ranked

LANGUAGES = {"rust": (".rs", rust_sites), "python": (".py", python_sites)}
FILES_MAX = 20_000
FILE_BYTES_MAX = 4 << 20
HEAD = ("RANK", "SCORE", "SITE", "AREA", "BUCKET", "SNIPPET", "HINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneInventoryConfig:
    """List copies in source files, ranked by hot-path likelihood and removal potential. It proves nothing and changes nothing."""

    paths: list[str] = option(
        [], "--paths", None, "Directories and files; default: the hot directories that exist here"
    )
    limit: int = option(200, "--limit", None, "Most rows to print; 0: all")
    format: str = option("text", "--format", None, "Form of the output", choices=("text", "json", "markdown"))
    only_actionable: bool = option(False, "--only-actionable", None, "Only copies that can perhaps go")
    include_tests: bool = option(False, "--include-tests", None, "Also copies in tests")
    language: str = option("rust", "--language", None, "Language of the sources", choices=tuple(LANGUAGES))

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"--limit {self.limit}: must be at least 0")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the inventory. Raise `ConfigError` for wrong options and missing paths."""
    words = sys.argv[1:] if argv is None else argv
    config = load(CloneInventoryConfig, one_flag_of_many(words), prog="clone_inventory.py")
    files = files_of(paths_of(config), config.language)
    if not files:
        suffix = LANGUAGES[config.language][0]
        sys.stderr.write(f"no {suffix} file below the paths; --language names the language: {', '.join(LANGUAGES)}\n")
    sites = ranked(
        scanned(files, config.language),
        only_actionable=config.only_actionable,
        include_tests=config.include_tests,
    )
    print(as_text(sites, config))
    return 0


def one_flag_of_many(words: Sequence[str]) -> list[str]:
    """Return a command line whose `--paths A B` is `--paths=A,B`."""
    found: list[str] = []
    paths: list[str] | None = None
    for word in words:
        if word == "--paths":
            paths = []
        elif paths is not None and not word.startswith("--"):
            paths.append(word)
        else:
            if paths is not None:
                found.append(f"--paths={','.join(paths)}")
                paths = None
            found.append(word)
    return found if paths is None else [*found, f"--paths={','.join(paths)}"]


def paths_of(config: CloneInventoryConfig) -> list[Path]:
    """Return the paths to scan. Raise `ConfigError` for one that does not exist."""
    suffix = LANGUAGES[config.language][0]
    if config.paths:
        return [given_path(name, suffix) for name in config.paths]
    hot = [Path(name) for _, _, beginnings in AREAS for name in beginnings]
    found = [path for path in (*hot, *(path.with_name(path.name + suffix) for path in hot)) if path.exists()]
    if not found:
        raise ConfigError("--paths: none of the hot directories exists here; name directories")
    return found


def given_path(name: str, suffix: str) -> Path:
    """Return a directory or file; a module may be named without its suffix. Raise `ConfigError` if there is none."""
    for path in (Path(name), Path(name + suffix)):
        if path.exists():
            return path
    raise ConfigError(f"--paths {name}: no such file or directory")


def files_of(paths: Sequence[Path], language: str) -> list[Path]:
    """Return the source files of a language below the paths, each once."""
    suffix = LANGUAGES[language][0]
    found: dict[Path, None] = {}
    for path in paths:
        for file in sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]:
            if not file.is_symlink() and file.stat().st_size <= FILE_BYTES_MAX:
                found[file] = None
    return list(found)[:FILES_MAX]


def scanned(files: Sequence[Path], language: str) -> Iterator[CloneSite]:
    """Yield the sites of all files; show progress on a terminal."""
    read = LANGUAGES[language][1]
    with activity("scanning") as show:
        for number, file in enumerate(files):
            show(f"scanning: {number} of {len(files)} files")
            yield from read(str(file), file.read_bytes())


def as_text(sites: Sequence[CloneSite], config: CloneInventoryConfig) -> str:
    """Return the output in the chosen form."""
    shown = sites[: config.limit] if config.limit else sites
    hints = PYTHON_HINTS if config.language == "python" else HINTS
    rows = [
        (
            str(rank),
            str(one.score),
            f"{one.path}:{one.line}",
            one.area,
            one.bucket.value,
            one.snippet,
            hints[one.bucket],
        )
        for rank, one in enumerate(shown, 1)
    ]
    buckets = Counter(one.bucket.value for one in sites)
    areas = Counter(one.area for one in sites)
    if config.format == "json":
        keys = [name.lower() for name in HEAD]
        values = [{**dict(zip(keys, row, strict=True)), "rank": int(row[0]), "score": int(row[1])} for row in rows]
        return json.dumps(
            {"sites": values, "shown": len(rows), "total": len(sites), "buckets": buckets, "areas": areas}, indent=2
        )
    if config.format == "markdown":
        lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    else:
        widths = [max(len(row[at]) for row in (HEAD, *rows)) for at in range(len(HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (HEAD, *rows)
        ]
    totals = [
        "",
        f"{len(rows)} of {len(sites)} sites",
        "by bucket: " + (", ".join(f"{name} {count}" for name, count in buckets.most_common()) or "none"),
        "by area: " + (", ".join(f"{name} {count}" for name, count in areas.most_common()) or "none"),
    ]
    return "\n".join([*lines, *totals])
