"""The public surface does not shrink: import paths, commands, flags, defaults, variables and metrics of the snapshot exist.

The snapshot was taken before the packages were rearranged. After an addition, or a removal that the changelog announces:
`python tools/public_surface.py`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tools.public_surface import ROOT, SNAPSHOT, Metrics, ast


def lines_of(surface: dict[str, Any]) -> Iterator[str]:
    for module, names in surface["modules"].items():
        for name, members in names.items():
            yield f"{module}.{name}"
            yield from (f"{module}.{name}: {member}" for member in members)
    for command, flags in surface["commands"].items():
        yield from (f"{command} {flag}" for flag in flags)
    yield from surface["variables"]
    yield from surface["metrics"]


@pytest.fixture(scope="module")
def present() -> set[str]:
    command = [sys.executable, str(ROOT / "tools" / "public_surface.py"), "--print"]
    return set(lines_of(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)))


def test_nothing_public_is_removed_and_additions_are_in_the_snapshot(present: set[str]) -> None:
    snapshot = set(lines_of(json.loads(SNAPSHOT.read_text(encoding="utf-8"))))
    assert len(snapshot) > 3000
    assert sorted(snapshot - present) == [], "removed"
    assert sorted(present - snapshot) == [], "added; run python tools/public_surface.py"


@pytest.mark.parametrize(
    ("source", "metrics"),
    [
        ("def f(registry):\n    registry.counter('a_total', 'Help', ('b', 'c'))", ["counter a_total b,c"]),
        ("P = 'p_'\nclass A:\n    def f(self, r):\n        r.gauge(P + 'x', '')", ["gauge p_x"]),
        ("def f(r, prefix):\n    r.gauge(f'{prefix}_x', '', labels=['y'])", ["gauge *_x y"]),
        ("T = {'x': 1, 'y': 2}\ndef f(r):\n    for n, w in T.items():\n        r.gauge(n, '')", ["gauge x", "gauge y"]),
        (
            "def f(r):\n    def g(n):\n        r.counter(f'a_{n}', '')\n    g('x')\n    g('y')",
            ["counter a_x", "counter a_y"],
        ),
        ("L = ('a',)\ndef f(r):\n    r.histogram('h', '', (*L, 'b'))", ["histogram h a,b"]),
    ],
)
def test_declared_metrics_are_found(source: str, metrics: list[str]) -> None:
    assert sorted(Metrics(ast.parse(source)).found()) == metrics
