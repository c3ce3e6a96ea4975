"""Directory events: a change is detected at once, where the system supports it."""

import asyncio
import sys
from pathlib import Path

import pytest

from dynamo.runtime.discovery.inotify import DirectoryEvents


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")
async def test_inotify_calls_back_on_a_change_in_a_directory(tmp_path: Path) -> None:
    changed = asyncio.Event()
    events = DirectoryEvents.open(changed.set)
    assert events is not None
    events.add(str(tmp_path))
    (tmp_path / "x").write_bytes(b"1")
    await asyncio.wait_for(changed.wait(), 5.0)
    changed.clear()
    (tmp_path / "x").unlink()
    await asyncio.wait_for(changed.wait(), 5.0)
    events.close()


async def test_inotify_is_absent_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert DirectoryEvents.open(lambda: None) is None
