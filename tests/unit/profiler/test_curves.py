from pathlib import Path

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.mocker.profile import profiled
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.profile_data import read_decode_profile, read_prefill_profile, read_profile
from dynamo.profiler import curves
from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape


def engine() -> AnalyticEngine:
    shape = model_shape(known_config("Qwen/Qwen3-32B") or {})
    return AnalyticEngine(shape=shape, gpu=gpu_spec("h200_sxm"), parallel=PickedParallelConfig(tp=2))


def test_prefill_grid_covers_the_context() -> None:
    grid = curves.prefill_grid(40960, 16)
    assert grid[0] == 100
    assert len(grid) == 17
    assert 40960 - 512 - 2522 < grid[-1] < 40960 - 512


def test_prefill_grid_of_a_short_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="three or more"):
        curves.prefill_grid(600, 16)


def test_concurrencies_are_multiples_of_the_ranks_from_one_per_rank_to_the_most() -> None:
    found = curves.concurrencies(1000, 6, 8)
    assert found[0] == 8
    assert found[-1] == 1000
    assert len(found) == 6
    assert all(one % 8 == 0 for one in found)
    assert curves.concurrencies(3, 6, 1) == [1, 2, 3]
    assert curves.concurrencies(7, 6, 8) == []


def test_decode_grid_stays_within_the_cache() -> None:
    for isl, levels in curves.decode_grid(40960, 100_000, 6, 1):
        assert max(levels) * (isl + 500) <= 100_000


def test_planner_and_mocker_read_the_files(tmp_path: Path) -> None:
    one = engine()
    prefill, decode = curves.estimated_prefill(one, 40960, 16), curves.estimated_decode(one, 40960, 6)
    curves.write(tmp_path, prefill, decode)
    read = read_prefill_profile(str(tmp_path))
    assert list(read.isl) == prefill.isl
    assert read_decode_profile(str(tmp_path)).max_kv_tokens == one.kv_tokens()
    assert read_profile(str(tmp_path), EngineRole.DECODE)
    timing = profiled(str(tmp_path))
    tokens = 64 * 4250
    assert timing.decode_ms(tokens, one.kv_tokens(), 64) == pytest.approx(
        one.decode_ms(tokens, one.kv_tokens(), 64), rel=0.15
    )


def test_arrays_have_the_names_and_shapes_of_the_released_profiler(tmp_path: Path) -> None:
    one = engine()
    curves.write(tmp_path, curves.estimated_prefill(one, 8192, 4), curves.estimated_decode(one, 8192, 4))
    with np.load(tmp_path / "selected_prefill_interpolation" / "raw_data.npz") as data:
        assert set(data.files) == {"prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"}
    with np.load(tmp_path / "selected_decode_interpolation" / "raw_data.npz") as data:
        assert data["max_kv_tokens"].shape == (1,)
        assert len({data[name].shape for name in ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")}) == 1
        assert 0 < data["x_kv_usage"].max() <= 1


def test_throughput_counts_all_ranks_and_gpus() -> None:
    curve = curves.PrefillCurve()
    curve.add(1000, 100.0, gpus=8, ranks=8)
    assert curve.thpt_per_gpu == [10000]
