"""Limits are declared apart from the store that applies them."""

from dynamo.api.batches.limits import BYTES_MAX, FILES_MAX, KEPT_S, StorageLimits


def test_limits_are_those_of_the_options_unless_given() -> None:
    limits = StorageLimits()
    assert (limits.bytes_max, limits.files_max) == (BYTES_MAX, FILES_MAX)
    assert StorageLimits(files_max=1) == StorageLimits(BYTES_MAX, 1, limits.open_batches_max)
    assert KEPT_S == 30 * 24 * 3600, "as OpenAI keeps them"
