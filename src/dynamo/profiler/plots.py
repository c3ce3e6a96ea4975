"""Plots of measured or estimated performance, as PNG files; matplotlib (the extra `plots`) is imported when one is drawn."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.profiler.curves import DECODE_FOLDER, PREFILL_FOLDER, DecodeCurve, PrefillCurve
from dynamo.profiler.thorough.journal import Measurement

GPU_DOLLARS_PER_HOUR = 3.0
DPI = 150
SIZE = (10, 6)

Draw = Callable[[Any], None]


def has_matplotlib() -> bool:
    """Return whether plots can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def save(path: Path, title: str, x: str, y: str, draw: Draw) -> None:
    """Write one plot. Raise `ConfigError` if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    draw(axes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"--output-dir: cannot write {path}: {error.strerror or error}") from None


def draw_curves(directory: Path, prefill: PrefillCurve, decode: DecodeCurve) -> None:
    """Draw the curves of the picked engines."""
    lengths = "Prompt tokens"
    for name, title, values, label in (
        ("prefill_ttft_interpolation", "TTFT by prompt length", prefill.ttft_ms, "TTFT, ms"),
        ("prefill_throughput_interpolation", "Prefill throughput by prompt length", prefill.thpt_per_gpu, "Tokens/s per GPU"),
    ):  # fmt: skip
        save(directory / PREFILL_FOLDER / f"{name}.png", title, lengths, label, _line(prefill.isl, values))
    for name, title, values, label in (
        ("decode_itl_interpolation", "ITL by cache use and context", decode.itl_ms, "ITL, ms"),
        ("decode_throughput_interpolation", "Decode throughput by cache use and context", decode.thpt_per_gpu, "Tokens/s per GPU"),
    ):  # fmt: skip
        use = "Share of the KV cache in use"
        save(directory / DECODE_FOLDER / f"{name}.png", title, use, label, _contexts(decode, values))


def draw_candidates(directory: Path, points: Sequence[Measurement], gpus: Mapping[str, tuple[int, int]]) -> None:
    """Draw the measurements of all candidates; `gpus`: GPUs and data-parallel ranks of an engine, by its label."""
    good = [one for one in points if not one.error]
    decodes: dict[str, list[Measurement]] = defaultdict(list)
    for one in good:
        if one.kind == "decode" and one.itl_ms:
            decodes[one.engine].append(one)

    def prefill(axes: Any) -> None:
        for one in good:
            if one.kind == "prefill" and one.ttft_ms:
                count, ranks = gpus[one.engine]
                _point(axes, one.ttft_ms, 1000 * one.isl * ranks / one.ttft_ms / count, one.engine)

    def decode(axes: Any) -> None:
        for engine, rows in decodes.items():
            _points(axes, engine, [(one.itl_ms, one.tok_s / gpus[engine][0]) for one in rows])

    def cost(axes: Any) -> None:
        for engine, rows in decodes.items():
            second = gpus[engine][0] * GPU_DOLLARS_PER_HOUR / 3600
            _points(axes, engine, [(1000 / one.itl_ms, second / one.tok_s * 1e6) for one in rows])

    per_gpu = "Tokens/s per GPU"
    save(directory / "prefill_performance.png", "Prefill of the candidates", "TTFT, ms", per_gpu, prefill)
    save(directory / "decode_performance.png", "Decode of the candidates", "ITL, ms", per_gpu, decode)
    save(
        directory / "cost_sla.png",
        f"Cost of output tokens, at {GPU_DOLLARS_PER_HOUR:g} $ per GPU and hour",
        "Tokens/s of one user",
        "$ per million output tokens",
        cost,
    )


def _points(axes: Any, engine: str, rows: Sequence[tuple[float, float]]) -> None:
    axes.plot(*zip(*sorted(rows), strict=True), marker="o", label=engine)
    axes.legend(title="Engine")


def _line(x: Sequence[float], y: Sequence[float]) -> Draw:
    return lambda axes: axes.plot(x, y, marker="o")


def _contexts(curve: DecodeCurve, values: Sequence[float]) -> Draw:
    """Return the drawing of one line for each context length."""

    def draw(axes: Any) -> None:
        for context in dict.fromkeys(curve.context):
            rows = [
                (use, value)
                for use, length, value in zip(curve.usage, curve.context, values, strict=True)
                if length == context
            ]
            axes.plot(*zip(*sorted(rows), strict=True), marker="o", label=f"{context:g} tokens")
        axes.legend(title="Context")

    return draw


def _point(axes: Any, x: float, y: float, label: str) -> None:
    axes.plot([x], [y], "o")
    axes.annotate(label, (x, y), textcoords="offset points", xytext=(6, 6))
