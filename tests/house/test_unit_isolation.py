"""Unit tests neither sleep nor open sockets: they wait with tests/settle.py or advance a ManualClock."""

import ast
import socket
from pathlib import Path

import pytest
from tests.unit_guards import SocketInUnitTest, no_sockets

UNIT = Path(__file__).resolve().parents[1] / "unit"
FILES = sorted(UNIT.rglob("*.py"))
SLEEPS = {"asyncio.sleep", "time.sleep", "anyio.sleep"}


def sleeps_in(source: str) -> list[int]:
    """Return the lines that name a function of `SLEEPS`; a source without the word is not parsed."""
    if "sleep" not in source:
        return []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [node.lineno for node in nodes if ast.unparse(node) in SLEEPS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(UNIT).as_posix())
def test_unit_test_does_not_sleep(path: Path) -> None:
    assert sleeps_in(path.read_text(encoding="utf-8")) == []


def test_sleeps_are_found_in_code_only() -> None:
    assert sleeps_in("import asyncio, time\ntime.sleep(1)\nasyncio.sleep(0)\nclock.sleep(1)\nx = 'time.sleep(1)'") == [
        2,
        3,
    ]


def test_guard_refuses_sockets_and_allows_pairs() -> None:
    with no_sockets():
        one, other = socket.socketpair()
        with one, other, socket.socket() as outside, pytest.raises(SocketInUnitTest):
            outside.connect(("127.0.0.1", 1))
