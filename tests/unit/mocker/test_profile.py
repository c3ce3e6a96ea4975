"""Step times from a profiler's files, in both of their formats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.mocker.profile import profiled


def points(directory: Path, **changed: object) -> None:
    prefill = {"prefill_isl": [2000, 1000], "prefill_ttft": [40.0, 20.0]}
    usage, context = [0.1, 0.2, 0.4, 0.8, 0.8], [500, 1000, 500, 2000, 1000]
    itl = [5 + 0.001 * 10_000 * u + 0.05 * 10_000 * u / c for u, c in zip(usage, context, strict=True)]
    decode = {"x_kv_usage": usage, "y_context_length": context, "z_itl": itl, "max_kv_tokens": 10_000} | changed
    (directory / "prefill_raw_data.json").write_text(json.dumps(prefill))
    (directory / "decode_raw_data.json").write_text(json.dumps(decode))


def test_profile_interpolates_the_points_of_the_profiler(tmp_path: Path) -> None:
    points(tmp_path)
    timing = profiled(str(tmp_path), speedup=2.0)
    assert (timing.prefill_ms(900), timing.prefill_ms(1500)) == (9.0, 15.0)
    assert timing.decode_ms(4000, 10_000, 8) * 2 == pytest.approx(5 + 4.0 + 0.4, rel=0.03)


def test_profile_arrays_and_raw_points_give_equal_times(tmp_path: Path) -> None:
    for name in ("prefill", "decode"):
        points(tmp_path)
        arrays = json.loads((tmp_path / f"{name}_raw_data.json").read_text())
        if "max_kv_tokens" in arrays:
            arrays["max_kv_tokens"] = [arrays["max_kv_tokens"]]
        where = tmp_path / "arrays" / f"selected_{name}_interpolation"
        where.mkdir(parents=True)
        columns: dict[str, Any] = {key: np.array(value) for key, value in arrays.items()}
        np.savez(where / "raw_data.npz", **columns)
    assert profiled(str(tmp_path / "arrays")).decode_ms(4000, 10_000, 8) == profiled(str(tmp_path)).decode_ms(
        4000, 10_000, 8
    )


def test_malformed_profile_points_are_refused(tmp_path: Path) -> None:
    points(tmp_path, z_itl=[1.0])
    with pytest.raises(ConfigError, match="do not match"):
        profiled(str(tmp_path))
    points(tmp_path, z_itl=None)
    with pytest.raises(ConfigError, match="z_itl is missing"):
        profiled(str(tmp_path))


def test_empty_profile_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found 0"):
        profiled(str(tmp_path))
