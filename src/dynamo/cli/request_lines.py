"""Request lines: how `dynamo requests` prints requests, as one line each or as a waterfall. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

from dynamo.console.request_views import RequestView, Stage

BAR = 40
"""Characters of a waterfall."""
ID_SHOWN = 8
"""Characters of an id in a line; `dynamo requests ID` accepts them."""
STAGE_NAMES = {
    "preprocess": "preprocess",
    "prefill_queue": "prefill queue",
    "prefill": "prefill worker",
    "route": "route",
    "queue": "router queue",
    "dispatch": "dispatch",
    "first_token": "wait for first token",
    "decode": "generate",
    "finish": "finish",
    "move": "lost by a failure",
}
COLUMNS = ("time", "request", "state", "model", "total", "ttft", "itl", "tokens", "worker", "cause")
WIDTHS = (8, ID_SHOWN, 9, 16, 9, 9, 9, 12, 16, 0)
RIGHT = frozenset({"total", "ttft", "itl", "tokens"})


def heading() -> str:
    """Return the line above the requests."""
    return _joined(COLUMNS)


def line(view: RequestView) -> str:
    """Return one request as a line."""
    worker = view.workers[0] if view.workers else "-"
    return _joined(
        (
            clock(view.started_at),
            view.id[:ID_SHOWN] or "refused",
            view.error_type or view.state,
            view.model or "-",
            duration(view.total_ms),
            duration(view.ttft_ms),
            duration(view.itl_ms),
            tokens(view),
            worker,
            view.cause or "-",
        )
    )


def tokens(view: RequestView) -> str:
    """Return the tokens as `prompt(cached)>output`; `-` for a request that ended before it was tokenized."""
    if view.prompt_tokens == view.output_tokens == 0:
        return "-"
    cached = f"({view.cached_tokens})" if view.cached_tokens else ""
    return f"{view.prompt_tokens}{cached}>{view.output_tokens}"


def explained(view: RequestView) -> str:
    """Return one request as a line, and the sentence about its cause below it."""
    return f"{line(view)}\n         {view.explanation}" if view.explanation else line(view)


def detail(view: RequestView) -> str:
    """Return everything that is known of one request."""
    where = f"prefill {view.prefill_worker}, " if view.prefill_worker else ""
    facts = [
        ("request", view.id),
        ("state", f"{view.state} {view.error_type}".strip()),
        ("model", f"{view.model or '-'}  {view.endpoint}  {view.type}"),
        ("started", f"{clock(view.started_at)}, took {duration(view.total_ms)}"),
        ("tokens", _token_counts(view)),
        ("latency", f"first token {duration(view.ttft_ms)}, between tokens {duration(view.itl_ms)}"),
        ("worker", where + (", ".join(view.workers) or "-")),
    ]
    if view.cost is not None:
        facts.append(("router", f"cost {view.cost:g}, {view.overlap_blocks} of {view.blocks} blocks cached"))
    lines = [f"{name:<8} {text}" for name, text in facts]
    if view.explanation:
        lines += ["", view.explanation]
    lines += ["", *waterfall(view.stages, view.total_ms)]
    for move in view.moves:
        worker = move.worker or "a worker"
        lines.append(f"after {duration(move.at_ms)} and {move.tokens} tokens {worker} failed: {move.error}")
    return "\n".join(lines)


def _token_counts(view: RequestView) -> str:
    if tokens(view) == "-":
        return "-"
    return f"{view.prompt_tokens} prompt ({view.cached_tokens or 0} cached), {view.output_tokens} output"


def waterfall(stages: Sequence[Stage], total_ms: float) -> list[str]:
    """Return a bar for each stage, to scale."""
    found, scale = [], BAR / max(total_ms, 1e-6)
    for stage in stages:
        end_ms = total_ms if stage.end_ms is None else stage.end_ms
        begin = min(BAR - 1, int(stage.begin_ms * scale))
        width = max(1, min(BAR - begin, round((end_ms - stage.begin_ms) * scale)))
        took = duration(end_ms - stage.begin_ms) + ("" if stage.end_ms is not None else " so far")
        name = STAGE_NAMES.get(stage.name, stage.name)
        found.append(f"{name:<20} |{(' ' * begin + '#' * width).ljust(BAR)}| {took}")
    return found


def clock(at: float) -> str:
    """Return a moment of the wall clock in the local time zone."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")


def duration(milliseconds: float | None) -> str:
    """Return a duration with its unit."""
    if milliseconds is None:
        return "-"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.1f} ms"


def _joined(cells: Sequence[str]) -> str:
    parts = [
        cell[:width].rjust(width) if name in RIGHT else (cell[:width].ljust(width) if width else cell)
        for name, width, cell in zip(COLUMNS, WIDTHS, cells, strict=True)
    ]
    return "  ".join(parts).rstrip()
