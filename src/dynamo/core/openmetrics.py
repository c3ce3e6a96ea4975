"""OpenMetrics: the choice between Prometheus text and OpenMetrics by `Accept`, and the conversion. Pure."""

import re
from collections.abc import Iterator
from itertools import islice

MEDIA_TYPE = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{MEDIA_TYPE}; version=1.0.0; charset=utf-8"
LINES_JOINED, SPLIT_CHARS = 4096, 1 << 18  # Handled at a time: no step takes more than a few milliseconds.
_WHOLE_BOUND = re.compile(r'(?<=[{,])((?:le|quantile)="-?[0-9]+)(")')


def prefers_openmetrics(accept: str) -> bool:
    """Return whether the header accepts a supported version of OpenMetrics at least as much as Prometheus text."""
    weights = {MEDIA_TYPE: 0.0, "text/plain": 0.0}
    for entry in accept.split(","):
        media, *words = [word.strip().lower() for word in entry.split(";")]
        if media not in weights:
            continue
        parameters = dict(word.split("=", 1) for word in words if "=" in word)
        if media == MEDIA_TYPE and parameters.get("version", "1.0.0") not in {"1.0.0", "0.0.1"}:
            continue
        weights[media] = max(weights[media], _weight(parameters.get("q", "1")))
    return 0 < weights[MEDIA_TYPE] >= weights["text/plain"]


def openmetrics(text: str) -> str:
    """Return an exposition in format 0.0.4 as OpenMetrics 1.0.

    Sample names do not change. A counter whose name does not end in `_total` is of type `unknown`: OpenMetrics allows
    no other name for a counter's samples.
    """
    lines, parts = _lines(text), list[str]()
    while part := list(islice(lines, LINES_JOINED)):
        parts.append("\n".join(part))
    return "\n".join([*parts, "# EOF\n"])


def _lines(text: str) -> Iterator[str]:
    help_line = ""
    for line in _split(text):
        if line.startswith("# HELP "):
            help_line = line
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            family = name.removesuffix("_total") if kind == "counter" else name
            if kind == "untyped" or (kind == "counter" and family == name):
                kind = "unknown"
            yield f"# TYPE {family} {kind}"
            if help_line.startswith(f"# HELP {name} "):
                yield f"# HELP {family} {help_line.removeprefix(f'# HELP {name} ')}"
            help_line = ""
        elif line and not line.startswith("#"):
            yield _WHOLE_BOUND.sub(r"\1.0\2", line) if "_bucket{" in line or "quantile=" in line else line


def _split(text: str) -> Iterator[str]:
    """Yield the lines of a text, which is split in parts: other threads run in between."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + SPLIT_CHARS) + 1 or len(text)
        yield from text[start:end].splitlines()
        start = end


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
