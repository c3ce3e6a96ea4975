"""A failed test that leaves sockets open fails no other test."""

import os
import subprocess
import sys
from pathlib import Path

from tests.house.source import ROOT

LEAKING = """
import asyncio, gc, socket
import pytest, zmq


def test_fails():
    opened, loop = socket.socket(), asyncio.new_event_loop()
    publisher = zmq.Context.instance().socket(zmq.PUB)
    assert opened is None


@pytest.fixture
def fails():
    opened = socket.socket()
    yield opened
    assert opened is None


def test_with_a_fixture(fails):
    pass


def test_passes():
    gc.collect()
"""


def test_leftovers_of_a_failed_test_do_not_fail_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    plugins = ("-p", "no:asyncio", "-p", "no:cacheprovider", "-p", "tests.leftovers")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 2 passed, 1 error" in done.stdout, done.stdout
