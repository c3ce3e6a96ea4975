import numpy as np
import pytest

from dynamo.cpu.adapter import Adapted, Adapter, Rows


@pytest.mark.parametrize(
    ("rows", "chosen", "places"),
    [
        (slice(2, 6), [4, 5, 6, 7], slice(0, 2)),
        (np.array([1, 4, 9]), [9, 3, 4], np.array([0, 2])),
        (slice(2, 6), [0, 1], None),
    ],
)
def test_adapter_rows_among_others_are_their_places(rows: Rows, chosen: list[int], places: Rows | None) -> None:
    adapter = Adapter("tuned", 1, 0, [])
    found = Adapted(adapter, rows).among(np.array(chosen), 10)
    if places is None:
        assert found is None
    else:
        assert found is not None
        assert found.adapter is adapter
        assert np.array_equal(np.arange(10)[found.rows], np.arange(10)[places])
