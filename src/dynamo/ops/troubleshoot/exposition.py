"""Exposition: sums of samples in a Prometheus text. Pure."""

import re
from collections.abc import Mapping

LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


def total(text: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the sum of a family's samples with the given labels; None if there is no sample of that name."""
    found: float | None = None
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in {"{", " "}:
            continue
        head, _, value = line.partition("}") if "{" in line else (name, "", line[len(name) :])
        try:
            number = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        given = dict(LABEL.findall(head))
        if labels is None or labels.items() <= given.items():
            found = (found or 0.0) + number
        elif found is None:
            found = 0.0
    return found
