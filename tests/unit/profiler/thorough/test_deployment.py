from pathlib import Path
from typing import Any

from dynamo.profiler.thorough.deployment import RunningDeployment, last_line, sequences_in

NO_STREAM: Any = None


def test_sequences_are_counted_in_whole_blocks() -> None:
    assert sequences_in(100, 64, 100) == 50
    assert sequences_in(100, 64, 128) == 33
    assert sequences_in(0, 0, 100) is None
    one = RunningDeployment(NO_STREAM, "", "m", 100, 64)
    assert (one.kv_tokens, one.sequences(100)) == (6400, 50)


def test_last_line_with_words_is_returned(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n│ two │\n╰──╯\n\n")
    assert last_line(tmp_path / "log") == "two"
    (tmp_path / "log").write_text("")
    assert last_line(tmp_path / "log") == "no output"
    assert last_line(tmp_path / "none") == ""
