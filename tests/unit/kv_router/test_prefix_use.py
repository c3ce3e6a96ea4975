"""Use of cached prefixes: counts that forget, and their effect on the weight of recomputation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_router import prefix_use
from dynamo.kv_router.balanced import COPIES, RECOMPUTE_SHARE_MIN, recompute_share
from dynamo.kv_router.prefix_use import PrefixUse

A, B = (4, b"aaaaaaaa"), (4, b"bbbbbbbb")


def test_share_is_that_of_the_recent_requests() -> None:
    use = PrefixUse()
    assert use.share(A, 8) == 0.0
    for at in range(1000):
        use.note((A, B, None, None)[at % 4], 8)
    assert use.share(A, 8) == pytest.approx(0.25, abs=0.01)
    for _ in range(1000):
        use.note(B, 8)
    assert use.share(A, 8) < 0.01
    assert use.share(B, 8) > 0.99


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=60), st.integers(1, 64))
def test_shares_are_at_most_one_together(kinds: list[int | None], ranks: int) -> None:
    use = PrefixUse()
    for kind in kinds:
        use.note(None if kind is None else (kind, b"k"), ranks)
    shares = [use.share((kind, b"k"), ranks) for kind in range(4)]
    assert all(share >= 0 for share in shares)
    assert sum(shares) <= 1 + 1e-9


def test_least_recently_used_beginning_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_use, "BEGINNINGS_MAX", 2)
    use = PrefixUse()
    for beginning in (A, B, A, (5, b"cccccccc")):
        use.note(beginning, 8)
    assert use.share(B, 8) == 0.0
    assert use.share(A, 8) > 0


def test_weight_falls_only_while_copies_are_too_few() -> None:
    assert recompute_share(copies=3, used_share=1 / 8, workers=8) == 1.0
    assert recompute_share(copies=2, used_share=1 / 8, workers=8) == pytest.approx(2 / COPIES)
    assert recompute_share(copies=1, used_share=1.0, workers=8) == RECOMPUTE_SHARE_MIN
    assert recompute_share(copies=1, used_share=0.0, workers=8) == 1.0
