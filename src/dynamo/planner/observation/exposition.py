"""Prometheus text: the samples of some metrics in an exposition. Pure."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

SERIES_MAX = 10_000
"""Samples that are kept of one exposition."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """Name and labels of one series."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str | None:
        """Return the value of a label; None if the series does not have it."""
        return dict(self.labels).get(name)


def samples_of(text: str, names: Collection[str]) -> Mapping[SeriesKey, float]:
    """Return the finite samples of these metrics; lines that cannot be read are left out."""
    found: dict[SeriesKey, float] = {}
    for line in text.split("\n"):  # A label value may contain other line separators.
        if line.startswith("#") or not (match := _SAMPLE.match(line)) or match[1] not in names:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value) and len(found) < SERIES_MAX:
            labels = _LABEL.findall(match[2] or "")
            found[SeriesKey(match[1], tuple(sorted((name, _unescaped(text)) for name, text in labels)))] = value
    return found


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)
