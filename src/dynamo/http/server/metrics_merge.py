"""Metrics merge: combines the expositions of several processes into one. Pure.

Counters and histograms are summed, and so are gauges that count. A gauge that is equal in every process (facts of a model
card, presence of a server) is taken from the process with the highest value.
"""

import re
from collections.abc import Iterable

from dynamo.core.metrics import format_number

_SAMPLE = re.compile(r"(?P<key>[a-zA-Z_:][\w:]*(?:\{.*\})?) (?P<value>\S+)")
_SAME_EVERYWHERE = re.compile(r"_model_|_connected$|_uptime_seconds$|_worker_|_info$")


def merge(texts: Iterable[str]) -> str:
    """Return one exposition that combines all of them."""
    families: dict[str, _Family] = {}
    for text in texts:
        family: _Family | None = None
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, _Family(name))
                family.help = family.help or line
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ", 3)
                family = families.setdefault(name, _Family(name))
                family.kind = kind
            elif family is not None and (sample := _SAMPLE.fullmatch(line)):
                family.add(sample["key"], float(sample["value"]))
    return "".join(one.render() for one in families.values())


class _Family:
    """All samples of one name, in order of appearance."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.help = ""
        self.kind = "untyped"
        self._samples: dict[str, float] = {}

    def add(self, key: str, value: float) -> None:
        known = self._samples.get(key)
        if known is None:
            self._samples[key] = value
        elif self.kind == "gauge" and _SAME_EVERYWHERE.search(self.name):
            self._samples[key] = max(known, value)
        else:
            self._samples[key] = known + value

    def render(self) -> str:
        head = [self.help] if self.help else []
        lines = [*head, f"# TYPE {self.name} {self.kind}"]
        lines += [f"{key} {format_number(value)}" for key, value in self._samples.items()]
        return "\n".join(lines) + "\n"
