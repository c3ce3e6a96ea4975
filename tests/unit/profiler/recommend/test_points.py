import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.candidates import EngineFamily
from dynamo.profiler.perf.calibration import closed_loop
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape
from dynamo.profiler.recommend.points import Correction, correction, parallel_of

START = EFFICIENCIES["vllm"].efficiency
FAMILY = EngineFamily(
    shape=model_shape(known_config("Qwen/Qwen3-8B") or {}), gpu=gpu_spec("h100_sxm"), gpus_per_node=8, efficiency=START
)
TP2 = PickedParallelConfig(tp=2)
SLOW = START.slowed(1.5)
"""Efficiencies of the measured engine."""


def slow_loop(isl: int, osl: int, batch: int) -> tuple[float, float]:
    return closed_loop(replace(FAMILY.engine(TP2), efficiency=SLOW), isl, osl, batch)


def export(folder: Path, concurrency: int) -> Path:
    """Write aiperf's export of a closed loop on the slow engine."""
    ttft_ms, tpot_ms = slow_loop(1000, 200, concurrency)
    value = {
        "input_config": {"loadgen": {"concurrency": concurrency}},
        "time_to_first_token": {"unit": "ms", "avg": ttft_ms},
        "inter_token_latency": {"unit": "ms", "avg": tpot_ms},
        "input_sequence_length": {"unit": "tokens", "avg": 1000.0},
        "output_sequence_length": {"unit": "tokens", "avg": 200.0},
    }
    folder.mkdir(parents=True)
    path = folder / "profile_export_aiperf.json"
    path.write_text(json.dumps(value))
    return path


def passes(*, is_named: bool) -> list[dict[str, Any]]:
    """Return rows of a forward-pass trace of the slow engine, and an idle one."""
    engine = replace(FAMILY.engine(TP2), efficiency=SLOW)
    rows = []
    for sequences in (0, 1, 8, 32, 64):
        for prompt in (0, 512, 4096):
            kv = 1500 * sequences
            wall_s = (engine.prefill_ms(prompt) + engine.decode_ms(kv, 0, sequences)) / 1000
            names = {
                "num_prefill_requests": int(prompt > 0), "sum_prefill_tokens": prompt, "var_prefill_length": 0.0,
                "sum_prefill_kv_tokens": 0, "num_decode_requests": sequences, "sum_decode_kv_tokens": kv,
                "var_decode_kv_tokens": 0.0,
            }  # fmt: skip
            named = {"version": 1, "wall_time": wall_s, "scheduled_requests": names}
            fpm: Any = named if is_named else [1, "7", 0, 3, wall_s, list(names.values()), [0] * 6]
            rows.append({"timestamp": 1, "event": {"schema": "dynamo.fpm.trace.v1", "fpm": fpm}})
    return rows


def median_itl_error(found: Correction) -> float:
    _, tpot_ms = slow_loop(2000, 100, 16)
    engine = replace(FAMILY.engine(TP2), efficiency=found.efficiency)
    return abs(closed_loop(engine, 2000, 100, 16)[1] / tpot_ms - 1)


def test_exports_of_aiperf_correct_the_estimate(tmp_path: Path) -> None:
    for concurrency in (1, 4, 16, 64):
        export(tmp_path / f"c{concurrency}", concurrency)
    found = correction([str(tmp_path)], FAMILY, TP2)
    assert found.source == f"4 exports of aiperf of {tmp_path}"
    assert median_itl_error(found) < 0.1
    assert found.itl_error is not None and found.itl_error < 0.15
    assert found.ttft_error is not None


def test_single_export_is_read(tmp_path: Path) -> None:
    path = export(tmp_path / "a", 8)
    found = correction([str(path)], FAMILY, TP2)
    assert found.itl_error is None
    assert median_itl_error(found) < 0.25


@pytest.mark.parametrize("is_named", [True, False])
def test_steps_of_a_forward_pass_trace_correct_the_estimate(tmp_path: Path, is_named: bool) -> None:
    path = tmp_path / "fpm.7.000000.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, passes(is_named=is_named))).encode()))
    found = correction([str(path)], FAMILY, TP2)
    assert found.source.startswith("14 kinds of steps")
    assert median_itl_error(found) < 0.1
    assert found.ttft_error is None


def test_points_of_several_files_are_fitted_together(tmp_path: Path) -> None:
    ttft_ms, tpot_ms = slow_loop(3000, 100, 8)
    loops = [
        {"concurrency": 8, "input_tokens": 3000, "output_tokens": 100, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "tp": 2}
    ]
    (tmp_path / "loops.json").write_text(json.dumps(loops))
    other = export(tmp_path / "a", 16)
    found = correction([str(tmp_path / "loops.json"), str(other)], FAMILY, TP2)
    assert found.source == f"1 closed loops of {tmp_path / 'loops.json'} and 1 export of aiperf of {other}"


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("none.json", None, "none.json: No such file"),
        ("bad.json", "{", "not JSON"),
        ("empty.json", "[]", "must have one point or more"),
        ("loops.json", '[{"concurrency": "a"}]', "Expected `int`"),
        ("aiperf.json", '{"concurrency": 3}', "input_sequence_length.avg is missing"),
        ("open.json", "{}", "has no concurrency"),
        ("fpm.jsonl", '{"event": {}}', "line 1: not a forward pass"),
        ("fpm.jsonl", "", "has no forward passes"),
        ("fpm.jsonl.gz", "text", "Not a gzipped file"),
        ("fpm.jsonl", '{"event": {"schema": "v2", "fpm": [1, "7", 0, 3, 1.0, [0, 0, 0, 0, 0, 0, 0]]}}', "schema 'v2'"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, name: str, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=error):
        correction([str(tmp_path / name)], FAMILY, TP2)


def test_directory_without_exports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no profile_export_aiperf"):
        correction([str(tmp_path)], FAMILY, TP2)


def test_parallelism_is_read() -> None:
    assert parallel_of("tp=4,pp=2", "--f") == PickedParallelConfig(tp=4, pp=2)
    assert parallel_of("", "--f") == PickedParallelConfig()
    for text in ("tp", "tp=0", "x=2", "tp=a"):
        with pytest.raises(ConfigError, match=f"--f {text}: must be like"):
            parallel_of(text, "--f")
