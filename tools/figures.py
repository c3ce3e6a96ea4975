"""Write the benchmark tables of README.md and benchmarks/README.md from the committed result files.

    python tools/figures.py

A test fails when a page differs from what this program writes, so that a figure is never edited by hand.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "frontend_cpu.json"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
BEGIN = "<!-- figures: frontend_cpu; written by tools/figures.py -->"
END = "<!-- end of figures -->"
OURS, THEIRS, SAME_ENGINE = "ours", "theirs", "ours+peer-mocker"
METRIC = "frontend_us_per_token"


def microseconds(cell: dict[str, float]) -> str:
    """Return a median with its range, as `3.5 (3.3-4.2)`."""
    digits = 1 if cell["median"] < 10 else 0
    return f"{cell['median']:.{digits}f} ({cell['low']:.{digits}f}–{cell['high']:.{digits}f})"


def row(load: str, systems: dict[str, Any]) -> str:
    """Return one line of the table: a load, both systems, their ratio, and the ratio with the same engine."""
    cells = [load.replace("c=", "").replace(" ", ", ", 1) + " streams"]
    cells += [microseconds(systems[name][METRIC]) for name in (OURS, THEIRS)]
    for name in (OURS, SAME_ENGINE):
        measured = systems.get(name)
        ratio = None if measured is None else measured[METRIC]["median"] / systems[THEIRS][METRIC]["median"]
        cells.append("not measured" if ratio is None else f"**{ratio:.2f}**" if name == OURS else f"{ratio:.2f}")
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Return the table and a line about the run."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    machine, config = result["machine"], result["config"]
    flags = " --same-engine" if any(SAME_ENGINE in systems for systems in result["medians"].values()) else ""
    run = (
        f"One run of `python -m benchmarks.frontend_cpu{flags}` on {machine['date']}: {machine['cores']} cores "
        f"({machine['processor']}), {result['peer']}, medians of {config['reps']} windows (lowest–highest), prompts of "
        f"{config['prompt_tokens']} tokens, answers of {config['output_tokens']}."
    )
    lines = [
        "| load | ours, CPU-µs per token | released | ratio | ratio with the same engine |",
        "|---|---:|---:|---:|---:|",
        *(row(load, systems) for load, systems in result["medians"].items()),
        "",
        run,
    ]
    return "\n".join(lines)


def written(text: str) -> str:
    """Return a page with the table between its markers."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"a page lacks the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
