"""Names and docstrings of tests, tools and benchmarks contain no word of tools/language.py."""

from functools import cache
from pathlib import Path

from tools import language

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "tests", ROOT / "tools", ROOT / "benchmarks"]
CORPUS = {ROOT / "tools" / name for name in ("demo_corpus.py", "eval_demo_model.py", "train_demo_model.py")}
"""Programs of the demo model, whose corpus is text about the words that people use."""
ALLOWED_NAMES = {"bootstrap_room", "ROOM", "room", "_room", "_rooms"}
"""SGLang's names of the rendezvous of a prefill and a decode worker."""
ALLOWED_WORDS = {
    ("tools/public_surface.py", "house"),  # The path tests/house.
}


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in folder.rglob("*.py") if path not in CORPUS)


def place(found: language.Finding) -> str:
    return found.path.relative_to(ROOT).as_posix()


def lines(found: list[language.Finding]) -> list[str]:
    return [f"{place(one)}:{one.line}: {one.word}: {one.text}" for one in found]


@cache
def docstrings() -> list[language.Finding]:
    return [one for one in language.below(files()) if one.kind == language.DOCSTRING]


def test_names_of_tests_tools_and_benchmarks_contain_no_listed_word() -> None:
    names = [one for path in files() for one in language.test_names(path)]
    assert lines([one for one in names if one.text not in ALLOWED_NAMES]) == []


def test_docstrings_of_tests_tools_and_benchmarks_contain_no_listed_word() -> None:
    assert lines([one for one in docstrings() if (place(one), one.word) not in ALLOWED_WORDS]) == []
