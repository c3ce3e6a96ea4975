"""LogRateLimit: a burst of equal warnings is a few lines and a count."""

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.log_rate_limit import LogRateLimit, LogRateLimitFilter
from dynamo.core.logging import JsonFormatter

KEY = ("dynamo.x", "garbage from %s")


def test_log_flood_filter_writes_the_first_lines_and_counts_the_suppressed_ones() -> None:
    flood = LogRateLimit(burst=2, window_s=10.0)
    assert [flood.admit(KEY, float(t)) for t in range(5)] == [0, 0, None, None, None]
    assert flood.admit(("dynamo.x", "another"), 5.0) == 0
    assert flood.admit(KEY, 10.0) == 3
    assert [flood.admit(KEY, 11.0), flood.admit(KEY, 12.0)] == [0, None]
    assert flood.admit(KEY, 100.0) == 1
    assert flood.admit(KEY, 200.0) == 0


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 5)), max_size=200),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_log_flood_filter_counts_every_line_of_a_remembered_kind(
    lines: list[tuple[str, float]], burst: int, keys_max: int
) -> None:
    flood, now, reported, written = LogRateLimit(burst, 10.0, keys_max), 0.0, 0, 0
    for word, after in lines:
        now += after
        kept_back = flood.admit(("x", word), now)
        if kept_back is not None:
            written += 1
            reported += kept_back
    waiting = sum(int(seen[2]) for seen in flood._seen.values())
    assert len(flood._seen) <= keys_max
    if keys_max == 4:
        assert written + reported + waiting == len(lines)
    else:
        assert written + reported + waiting <= len(lines)


@pytest.mark.parametrize(("level", "count"), [(logging.WARNING, 3), (logging.ERROR, 3), (logging.INFO, 1000)])
def test_log_flood_filter_limits_a_message_format_regardless_of_its_arguments(level: int, count: int) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    now = 0.0
    handler.addFilter(LogRateLimitFilter(LogRateLimit(burst=3), lambda: now))
    logger = logging.Logger("dynamo.x")  # noqa: LOG001 - one that no other test hears of
    logger.addHandler(handler)
    for number in range(1000):
        logger.log(level, "garbage from %s", number)
    lines = stream.getvalue().splitlines()
    assert len(lines) == count
    assert "garbage from 0" in lines[0]
    now = 20.0
    logger.log(level, "garbage from %s", "again")
    assert json.loads(stream.getvalue().splitlines()[-1]).get("kept_back", 0) == 1000 - count
