"""Parts of long sequences."""

import pytest

from dynamo.core.slices import SLICE_VALUES, joined, slices


@pytest.mark.parametrize("count", [0, 1, SLICE_VALUES, SLICE_VALUES + 1, 3 * SLICE_VALUES])
def test_parts_are_short_and_together_the_whole(count: int) -> None:
    values = list(range(count))
    parts = list(slices(values))
    assert max(map(len, parts)) <= SLICE_VALUES
    assert len(parts) == max(1, -(-count // SLICE_VALUES))
    assert [one for part in parts for one in part] == values
    assert joined(range(count)) == values


def test_a_short_sequence_is_not_copied() -> None:
    values = [1, 2, 3]
    [part] = slices(values)
    assert part is values
