"""Write the tables of benchmarks/README.md and docs/scale.md, the figures of README.md, and plots, from the committed result files.

    python -m tools.figures

A test fails when a page or the chart differs from what this program writes, so that a figure is never edited by hand.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.aims import AIMS, figures_of
from benchmarks.report import number as three_digits
from tools import scale_figures

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "frontend_cpu.json"
PAGE = ROOT / "benchmarks" / "README.md"
CHART = ROOT / "docs" / "pictures" / "frontend_cpu.svg"
README = ROOT / "README.md"
BEGIN = "<!-- figures: {}; written by tools/figures.py -->"
END = "<!-- end of figures -->"
OURS, THEIRS, SAME_ENGINE, BARE = "ours", "theirs", "ours+peer-mocker", "bare writer"
NOT_MEASURED = "not measured"
METRIC = "frontend_us_per_token"
WIDTH_PX, LABEL_PX, BAR_PX, HEAD_PX, FOOT_PX = 760, 176, 16, 62, 34
COLORS = {OURS: "#1f77b4", THEIRS: "#9aa4af"}


def median(value: float) -> str:
    """Return a median with one decimal below ten and none above."""
    return f"{value:.{1 if value < 10 else 0}f}"


def microseconds(cell: dict[str, float]) -> str:
    """Return a median with its range, as `3.5 (3.3-4.2)`."""
    digits = 1 if cell["median"] < 10 else 0
    return f"{cell['median']:.{digits}f} ({cell['low']:.{digits}f}–{cell['high']:.{digits}f})"


def label(load: str) -> str:
    """Return a load such as `paced c=64` as `paced, 64 streams`; ` on 2 workers` remains at the end."""
    streams, on, workers = load.partition(" on ")
    words = streams.replace("c=", "").replace(" ", ", ", 1)
    return f"{words} stream{'' if words.endswith(' 1') else 's'}{on}{workers}"


def row(load: str, systems: dict[str, Any]) -> str:
    """Return one line of the table: a load, both systems, their ratio, with the same engine, and to a bare writer."""
    cells = [label(load)]
    cells += [microseconds(systems[name][METRIC]) for name in (OURS, THEIRS)]
    own, same, bare = ratio(systems, OURS, THEIRS), ratio(systems, SAME_ENGINE, THEIRS), ratio(systems, OURS, BARE)
    cells.append("" if own is None else f"**{own:.2f}**")
    cells += [NOT_MEASURED if value is None else f"{value:.2f}" for value in (same, bare)]
    return "| " + " | ".join(cells) + " |"


def ratio(systems: dict[str, Any], name: str, base: str) -> float | None:
    """Return a system's cost of a token over another's; None if one was not measured."""
    if name not in systems or base not in systems:
        return None
    return float(systems[name][METRIC]["median"] / systems[base][METRIC]["median"])


def table() -> str:
    """Return the table and a line about the run."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    machine, config = result["machine"], result["config"]
    measured = {name for systems in result["medians"].values() for name in systems}
    flags = (" --same-engine" if SAME_ENGINE in measured else "") + (" --bare" if BARE in measured else "")
    run = (
        f"One run of `python -m benchmarks.frontend_cpu{flags}` on {machine['date']}: {machine['cores']} cores "
        f"({machine['processor']}), {result['peer']}, medians of {config['reps']} windows (lowest–highest), prompts of "
        f"{config['prompt_tokens']} tokens, answers of {config['output_tokens']}."
    )
    lines = [
        "| load | ours, CPU-µs per token | released | ratio | ratio with the same engine | ratio to a bare writer |",
        "|---|---:|---:|---:|---:|---:|",
        *(row(load, systems) for load, systems in result["medians"].items()),
        "",
        run + kv_cost(result.get("kv_over_round_robin", {})),
    ]
    return "\n".join(lines)


def kv_cost(ratios: dict[str, dict[str, float]]) -> str:
    """Return the sentence about the KV router's cost over round robin; empty if both were not measured."""
    shown = [
        f"{label(load)} {systems[OURS]:.2f} (released {systems[THEIRS]:.2f})"
        for load, systems in ratios.items()
        if OURS in systems and THEIRS in systems
    ]
    return f" KV mode over round robin with the same two workers: {', '.join(shown)}." if shown else ""


def summary() -> str:
    """Return the sentence of README.md: ranges of the ratios, with each system's own engine and with the same one."""
    medians = json.loads(RESULT.read_text(encoding="utf-8"))["medians"]
    parts = []
    for name, words in ((OURS, "each before its own engines"), (SAME_ENGINE, "both before the released mockers")):
        for pace in ("saturated", "paced"):
            values = [ratio(systems, name, THEIRS) for load, systems in medians.items() if load.startswith(pace)]
            found = sorted(value for value in values if value is not None)
            shown = f"{found[0]:.2f}–{found[-1]:.2f}" if found else NOT_MEASURED
            parts.append(f"{shown} {pace}" + (f" ({words})" if pace == "paced" else ""))
    return f"CPU per token over that of the released frontend: {parts[0]} and {parts[1]}; {parts[2]} and {parts[3]}."


def result_files() -> str:
    """Return a table of the committed result files and where they come from."""
    lines = [
        "| file | date | commit | cores | other load, cores | load average | seconds |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for path in sorted(RESULT.parent.glob("*.json")):
        machine = json.loads(path.read_text(encoding="utf-8")).get("machine", {})
        average = machine.get("load_average")
        cells = [machine.get(name, "") for name in ("date", "commit", "cores", "other_cores")]
        cells += ["" if average is None else round(average, 1), machine.get("seconds", "")]
        lines.append(f"| `{path.name}` | " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def aims() -> str:
    """Return a table of the main figures of every result file, with their aims, and the reasons for missed ones."""
    lines = ["| program | figure | value | aim | |", "|---|---|---:|---|---|"]
    missed = []
    for name in AIMS:
        path = RESULT.parent / f"{name}.json"
        if not path.exists():
            lines.append(f"| `{name}` | {NOT_MEASURED} | | | |")
            continue
        found = figures_of(name, json.loads(path.read_text(encoding="utf-8")))
        absent = {aim.name for aim in AIMS[name]} - {one.name for one in found}
        lines += [
            f"| `{name}` | {aim.name} | {NOT_MEASURED} | {aim.limit_text} | |"
            for aim in AIMS[name]
            if aim.name in absent
        ]
        for one in found:
            verdict = "**missed**" if one.is_met is False else one.verdict
            lines.append(f"| `{name}` | {one.name} | {three_digits(one.value)} | {one.aim} | {verdict} |")
            if one.is_met is False and one.why and one.why not in missed:
                missed.append(f"- `{name}`: {one.why}.")
    return "\n".join([*lines, "", "Why aims are missed, as far as known:", "", *dict.fromkeys(missed)])


def written(text: str, name: str, content: str) -> str:
    """Return a page with the content between the markers of that name. Raise `ValueError` for a page without them."""
    begin = BEGIN.format(name)
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"a page lacks the markers {begin} and {END}")
    return f"{head}{begin}\n\n{content}\n\n{END}{tail}"


def pages() -> dict[Path, str]:
    """Return the pages with their figures."""
    page, readme = PAGE.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    page = written(page, "frontend_cpu", table())
    scale = scale_figures.PAGE.read_text(encoding="utf-8")
    for name, content in scale_figures.tables().items():
        scale = written(scale, name, content)
    return {
        PAGE: written(written(page, "result files", result_files()), "aims", aims()),
        README: written(readme, "frontend_cpu", summary()),
        scale_figures.PAGE: scale,
    }


def chart() -> str:
    """Return the medians of both systems as an SVG bar chart that is legible on light and dark pages."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    medians = result["medians"]
    scale = (WIDTH_PX - LABEL_PX - 60) / max(systems[THEIRS][METRIC]["median"] for systems in medians.values())
    step = 2 * BAR_PX + 14
    height = HEAD_PX + len(medians) * step + FOOT_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{height}" viewBox="0 0 {WIDTH_PX} {height}" role="img"',
        '     font-family="ui-sans-serif, system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" fill="#1f2328">',
        "  <title>Processor time of the frontend per output token</title>",
        f'  <rect x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{height - 1}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        '  <text x="18" y="26" font-weight="600">Processor time of the frontend, µs per output token (lower is better)</text>',
    ]
    for x, name, text in ((18, OURS, "dynamo-serve"), (140, THEIRS, result["peer"])):
        parts.append(f'  <rect x="{x}" y="38" width="11" height="11" fill="{COLORS[name]}"/>')
        parts.append(f'  <text x="{x + 17}" y="48">{text}</text>')
    for number, (load, systems) in enumerate(medians.items()):
        top = HEAD_PX + number * step
        parts.append(f'  <text x="{LABEL_PX - 8}" y="{top + BAR_PX + 5}" text-anchor="end">{label(load)}</text>')
        for place, name in enumerate((OURS, THEIRS)):
            value, y = systems[name][METRIC]["median"], top + place * BAR_PX
            parts.append(
                f'  <rect x="{LABEL_PX}" y="{y}" width="{value * scale:.1f}" height="{BAR_PX - 2}" fill="{COLORS[name]}"/>'
            )
            parts.append(
                f'  <text x="{LABEL_PX + value * scale + 6:.1f}" y="{y + 12}" font-size="12">{median(value)}</text>'
            )
    machine = result["machine"]
    foot = f"{machine['date']}, {machine['cores']} cores ({machine['processor']}), medians of {result['config']['reps']} windows"
    parts.append(f'  <text x="18" y="{height - 14}" font-size="12" fill="#57606a">{foot}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Rewrite the pages and the chart."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path, picture in {CHART: chart(), **scale_figures.pictures()}.items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
