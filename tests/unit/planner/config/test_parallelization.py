"""Parallelism of an engine."""

import pytest

from dynamo.planner.config.parallelization import PickedParallelConfig, picked_to_aic_model_config_kwargs


@pytest.mark.parametrize(
    ("widths", "gpus", "heads", "label"),
    [
        ({}, 1, 1, "tp1"),
        ({"tp": 4, "pp": 2}, 8, 4, "tp4-pp2"),
        ({"tp": 2, "moe_tp": 2}, 2, 2, "tp2-moetp2"),
        ({"tp": 1, "dp": 2, "moe_ep": 2}, 2, 1, "tp1-dp2-moeep2"),
        ({"tp": 2, "moe_ep": 2}, 2, 1, "tp2-moeep2"),
    ],
)
def test_parallel_widths_determine_gpus_heads_and_label(
    widths: dict[str, int], gpus: int, heads: int, label: str
) -> None:
    config = PickedParallelConfig(**widths)
    assert (config.num_gpus, config.tp_size, config.label()) == (gpus, heads, label)


def test_parallel_config_is_converted_to_performance_database_names() -> None:
    found = picked_to_aic_model_config_kwargs(PickedParallelConfig(tp=2, dp=3, moe_ep=6))
    assert found == {"tp_size": 2, "pp_size": 1, "moe_tp_size": 1, "moe_ep_size": 6, "attention_dp_size": 3}
