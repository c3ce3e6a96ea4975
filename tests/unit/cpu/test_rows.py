import json
from pathlib import Path

import pytest
from tests.unit.cpu.conftest import CONFIG

from dynamo.cpu.architecture import Architecture
from dynamo.cpu.rows import BLOCK_ROWS_MAX, SHARE_ROWS_MIN, RowBuffers


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 2 * SHARE_ROWS_MIN, 2 * BLOCK_ROWS_MAX + 1, 3000])
def test_rows_are_divided_over_threads_without_gap_or_overlap(tmp_path: Path, rows: int, threads: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shares = RowBuffers(Architecture.read(str(tmp_path)), 3000, threads).shares(rows)
    blocks = [block.rows for share in shares for block in share]
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(rows))
    assert all(block.stop - block.start <= BLOCK_ROWS_MAX for block in blocks)
    assert len(shares) == max(1, min(threads, rows // SHARE_ROWS_MIN))
