"""Selection of the pool of a request."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.global_router.pool_selection import (
    Dimension,
    GlobalRouterConfig,
    get_priority_retry_order,
    load_config,
)

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


def pools(tmp_path: Path, content: dict[str, Any], **changes: Any) -> GlobalRouterConfig:
    path = tmp_path / "pools.json"
    path.write_text(json.dumps({**content, **changes}))
    return load_config(path)


def retry_order(config: GlobalRouterConfig, selected: int) -> list[int]:
    return get_priority_retry_order(selected, config.pools("prefill").priorities, config.enable_priority_retry)


def test_length_and_target_choose_a_prefill_pool(tmp_path: Path) -> None:
    prefill = pools(tmp_path, DISAGG).prefill_pool_selection_strategy
    assert prefill is not None
    assert prefill.select_pool(100, ttft_target_ms=50) == 0
    assert prefill.select_pool(100, ttft_target_ms=2000) == 1
    assert prefill.select_pool(20_000, ttft_target_ms=2000) == 2
    assert prefill.select_pool(10**9, ttft_target_ms=-5) == 1
    assert prefill.select_pool(100) == 1  # The middle of the range.
    assert prefill.select_pool(20_000, ttft_target_ms=2000, priority=10) == 0
    assert prefill.select_pool(20_000, ttft_target_ms=2000, priority=101) == 2
    assert (prefill.isl_step, prefill.ttft_step_ms) == (16_000, 1495)


def test_length_and_target_choose_a_decode_pool(tmp_path: Path) -> None:
    decode = pools(tmp_path, DISAGG).decode_pool_selection_strategy
    assert decode is not None
    assert decode.select_pool(100, itl_target_ms=20) == 0
    assert decode.select_pool(31_000, itl_target_ms=400) == 1
    assert (decode.context_length_step, decode.itl_step_ms) == (16_000, 245)


def test_length_is_a_third_dimension_of_aggregated_pools(tmp_path: Path) -> None:
    agg = pools(tmp_path, AGG).agg_pool_selection_strategy
    assert agg is not None
    assert agg.select_pool(isl=4096) == 0
    assert agg.select_pool(isl=16384) == 1
    flat = {name: value for name, value in AGG["agg_pool_selection_strategy"].items() if not name.startswith("isl")}
    flat |= {"itl_resolution": 2, "agg_pool_mapping": [[0, 1]]}
    agg = pools(tmp_path, AGG, agg_pool_selection_strategy=flat).agg_pool_selection_strategy
    assert agg is not None
    assert agg.select_pool(isl=4096, itl_target_ms=10) == 0
    assert agg.select_pool(isl=4096, itl_target_ms=90) == 1
    assert (agg.ttft_step_ms, agg.itl_step_ms) == (9999, 49.5)


def test_retry_order_is_from_slow_to_fast_pools(tmp_path: Path) -> None:
    config = pools(tmp_path, DISAGG, enable_priority_retry=True)
    assert retry_order(config, 2) == [2, 1, 0]
    assert retry_order(config, 0) == [0]
    config = pools(tmp_path, DISAGG, enable_priority_retry=True, prefill_pool_priorities=[5, 5, 1])
    assert retry_order(config, 0) == [0, 2]
    assert retry_order(config, 2) == [2]
    assert retry_order(pools(tmp_path, DISAGG), 2) == [2]
    with pytest.raises(ValueError, match="selected_pool 3"):
        retry_order(config, 3)


def test_former_names_of_targets_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = dict(AGG["agg_pool_selection_strategy"])
    strategy["ttft_min"], strategy["itl_max"] = strategy.pop("ttft_min_ms"), strategy.pop("itl_max_ms")
    agg = pools(tmp_path, AGG, agg_pool_selection_strategy=strategy).agg_pool_selection_strategy
    assert agg is not None
    assert (agg.ttft_min_ms, agg.itl_max_ms) == (1, 100)
    assert "ttft_min is deprecated; use ttft_min_ms" in caplog.text


def test_default_priorities_follow_the_order_of_the_pools(tmp_path: Path) -> None:
    assert pools(tmp_path, AGG).agg_pool_priorities == [0, 1]


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_every_value_has_a_valid_bucket(value: float, buckets: int) -> None:
    assert 0 <= Dimension("isl", "", 10.0, 500.0, buckets).bucket(value) < buckets


@pytest.mark.parametrize(
    ("content", "changes", "named"),
    [
        (DISAGG, {"num_prefill_pools": 2}, "num_prefill_pools"),
        (DISAGG, {"prefill_pool_priorities": [1]}, "prefill_pool_priorities"),
        (DISAGG, {"prefill_pool_dynamo_namespaces": []}, "prefill_pool_dynamo_namespaces"),
        (DISAGG, {"decode_pool_selection_strategy": None}, "decode_pool_selection_strategy"),
        (DISAGG, {"unknown": 1}, "unknown"),
        (DISAGG, {"decode_pool_priorities": [0, "1"]}, "decode_pool_priorities"),
        (DISAGG, {"enable_priority_retry": "yes"}, "enable_priority_retry"),
        (DISAGG, {"mode": "agg"}, "num_agg_pools required"),
        (DISAGG, {"mode": "other"}, "Unknown mode"),
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
            r"Invalid prefill pool index 7 in prefill_pool_mapping\[1\]\[1\]",
        ),
        (
            DISAGG,
            {
                "prefill_pool_selection_strategy": {
                    **DISAGG["prefill_pool_selection_strategy"],
                    "prefill_pool_mapping": [[0, 1]],
                }
            },
            r"rows \(1\) does not match isl_resolution \(2\)",
        ),
        (
            AGG,
            {"agg_pool_selection_strategy": {**AGG["agg_pool_selection_strategy"], "isl_max": None}},
            "configured together",
        ),
    ],
)
def test_contradictory_pool_configuration_is_refused_by_name(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        pools(tmp_path, content, **changes)
