from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.thorough.journal import Measurement, MeasurementJournal

DONE = Measurement(engine="tp1", kind="decode", isl=100, osl=500, concurrency=4, ttft_ms=20.0, itl_ms=5.0, tok_s=800.0)
FAILED = Measurement(engine="tp2", kind="decode", isl=100, osl=500, concurrency=4, error="1 requests were not answered")


def test_finished_measurements_are_found_again(tmp_path: Path) -> None:
    MeasurementJournal.opened(tmp_path).add(DONE)
    assert MeasurementJournal.opened(tmp_path).known == {DONE.key: DONE}


def test_failed_measurements_are_repeated(tmp_path: Path) -> None:
    MeasurementJournal.opened(tmp_path).add(FAILED)
    assert MeasurementJournal.opened(tmp_path).known == {}


def test_truncated_journal_line_is_skipped(tmp_path: Path) -> None:
    journal = MeasurementJournal.opened(tmp_path)
    journal.add(DONE)
    with journal.path.open("ab") as file:
        file.write(b'{"engine": "tp')
    assert set(MeasurementJournal.opened(tmp_path).known) == {DONE.key}


def test_unwritable_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        MeasurementJournal(tmp_path / "absent" / "measurements.jsonl").add(DONE)
