"""Which pool a request goes to."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.global_router.pools import Dimension, Pools, Wanted, read_pools, wanted_of

DISAGG: dict[str, Any] = {
    "num_prefill_pools": 3,
    "num_decode_pools": 2,
    "prefill_pool_dynamo_namespaces": ["p-fast", "p-mid", "p-slow"],
    "decode_pool_dynamo_namespaces": ["d-fast", "d-slow"],
    "prefill_pool_selection_strategy": {
        "isl_min": 0,
        "isl_max": 32000,
        "isl_resolution": 2,
        "ttft_min_ms": 10,
        "ttft_max_ms": 3000,
        "ttft_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [1, 2]],
        "priority_overrides": [{"min_priority": 10, "max_priority": 100, "target_pool": 0}],
    },
    "decode_pool_selection_strategy": {
        "context_length_min": 0,
        "context_length_max": 32000,
        "context_length_resolution": 2,
        "itl_min_ms": 10,
        "itl_max_ms": 500,
        "itl_resolution": 2,
        "decode_pool_mapping": [[0, 1], [0, 1]],
    },
}
AGG: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["a", "b"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 1,
        "ttft_max_ms": 10000,
        "ttft_resolution": 1,
        "itl_min_ms": 1,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "isl_min": 0,
        "isl_max": 24576,
        "isl_resolution": 2,
        "agg_pool_mapping": [[[0]], [[1]]],
    },
}


def pools(tmp_path: Path, content: dict[str, Any], **changes: Any) -> dict[Any, Pools]:
    path = tmp_path / "pools.json"
    path.write_text(json.dumps({**content, **changes}))
    return read_pools(str(path))


def test_length_and_target_choose_a_prefill_pool(tmp_path: Path) -> None:
    prefill = pools(tmp_path, DISAGG)["prefill"]
    assert prefill.choose(Wanted(100, ttft_ms=50)) == 0
    assert prefill.choose(Wanted(100, ttft_ms=2000)) == 1
    assert prefill.choose(Wanted(20_000, ttft_ms=2000)) == 2
    assert prefill.choose(Wanted(10**9, ttft_ms=-5)) == 1
    assert prefill.choose(Wanted(100)) == 1  # The middle of the range.
    assert prefill.choose(Wanted(20_000, ttft_ms=2000, priority=10)) == 0
    assert prefill.choose(Wanted(20_000, ttft_ms=2000, priority=101)) == 2


def test_length_is_a_third_dimension_of_aggregated_pools(tmp_path: Path) -> None:
    agg = pools(tmp_path, AGG)["agg"]
    assert agg.choose(Wanted(4096)) == 0
    assert agg.choose(Wanted(16384)) == 1
    flat = {name: value for name, value in AGG["agg_pool_selection_strategy"].items() if not name.startswith("isl")}
    flat |= {"itl_resolution": 2, "agg_pool_mapping": [[0, 1]]}
    agg = pools(tmp_path, AGG, agg_pool_selection_strategy=flat)["agg"]
    assert agg.choose(Wanted(4096, itl_ms=10)) == 0
    assert agg.choose(Wanted(4096, itl_ms=90)) == 1


def test_a_failed_pool_is_followed_by_faster_ones_from_slow_to_fast(tmp_path: Path) -> None:
    prefill = pools(tmp_path, DISAGG, enable_priority_retry=True)["prefill"]
    assert prefill.order(2) == [2, 1, 0]
    assert prefill.order(0) == [0]
    prefill = pools(tmp_path, DISAGG, enable_priority_retry=True, prefill_pool_priorities=[5, 5, 1])["prefill"]
    assert prefill.order(0) == [0, 2]
    assert prefill.order(2) == [2]
    assert pools(tmp_path, DISAGG)["prefill"].order(2) == [2]


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_every_value_is_in_a_bucket(value: float, buckets: int) -> None:
    assert 0 <= Dimension("isl", 10.0, 500.0, buckets).bucket(value) < buckets


def test_a_request_says_its_targets_and_its_priority() -> None:
    request = {
        "token_ids": [1, 2, 3],
        "router": {"ttft_target": 100, "itl_target": 20.5},
        "routing": {"priority": 50},
    }
    assert wanted_of(request, None, None) == Wanted(3, 100, 20.5, 50)
    assert wanted_of({"extra_args": {"ttft_target": 7}}, 1.0, 2.0) == Wanted(0, 7, 2.0, None)
    assert wanted_of({"router": {"ttft_target": "x"}, "token_ids": None}, 1.0, None) == Wanted(0, 1.0, None, None)


@pytest.mark.parametrize(
    ("content", "changes", "named"),
    [
        (DISAGG, {"num_prefill_pools": 2}, "num_prefill_pools"),
        (DISAGG, {"prefill_pool_priorities": [1]}, "prefill_pool_priorities"),
        (DISAGG, {"prefill_pool_dynamo_namespaces": []}, "prefill_pool_dynamo_namespaces"),
        (DISAGG, {"decode_pool_selection_strategy": None}, "decode_pool_selection_strategy"),
        (DISAGG, {"unknown": 1}, "unknown"),
        (DISAGG, {"mode": "agg"}, "agg_pool_selection_strategy"),
        (DISAGG, {"mode": "other"}, "mode"),
        (
            DISAGG,
            {"prefill_pool_selection_strategy": {**DISAGG["prefill_pool_selection_strategy"], "isl_resolution": 0}},
            "isl_resolution",
        ),
        (
            DISAGG,
            {"prefill_pool_selection_strategy": {**DISAGG["prefill_pool_selection_strategy"], "isl_max": 0}},
            "isl",
        ),
        (
            DISAGG,
            {
                "prefill_pool_selection_strategy": {
                    **DISAGG["prefill_pool_selection_strategy"],
                    "prefill_pool_mapping": [[0, 1], [1, 7]],
                }
            },
            r"prefill_pool_mapping\[1\]\[1\] is 7",
        ),
        (
            DISAGG,
            {
                "prefill_pool_selection_strategy": {
                    **DISAGG["prefill_pool_selection_strategy"],
                    "prefill_pool_mapping": [[0, 1]],
                }
            },
            "one for each bucket of isl",
        ),
        (
            AGG,
            {"agg_pool_selection_strategy": {**AGG["agg_pool_selection_strategy"], "isl_max": None}},
            "given together",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_named(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        pools(tmp_path, content, **changes)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        read_pools(str(tmp_path / "missing.json"))
