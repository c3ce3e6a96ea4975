"""Rank that the router selected."""

import pytest

from dynamo.common.backend import dp_rank


def test_rank_of_another_worker_is_not_forced(caplog: pytest.LogCaptureFixture) -> None:
    assert dp_rank.forced_dp_rank({"token_ids": [], "routing": {"dp_rank": "3"}}) == 3
    assert dp_rank.forced_dp_rank({"token_ids": [], "routing": {"dp_rank": None}}) is None
    assert dp_rank.validate_global_dp_rank(3, 2, 2, "e") == 3
    assert dp_rank.validate_global_dp_rank(0, 0, 1, "e") is None
    assert dp_rank.validate_global_dp_rank(4, 2, 2, "e") is None
    assert "dp_rank 4 is outside [2, 4)" in caplog.text
