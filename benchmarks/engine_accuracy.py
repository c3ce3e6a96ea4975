"""Accuracy of the profiler's performance model against published measurements of real engines.

    python -m benchmarks.engine_accuracy [--quick]

The points are those of `measured_engines.csv`: closed loops on GPUs, published with AIConfigurator (Apache-2.0, `silicon_sample.csv`
of github.com/ai-dynamo/aiconfigurator at 095f58a), reduced to the medians of equal runs. Three questions are answered:

- How large is the error on an engine that the efficiencies were not fitted to? Each pair of model and GPU is left out once.
- How large is it where a few points of the same engine are known? Each of NVIDIA's five B200 points is predicted from the other
  four, starting from efficiencies that have seen no point of this model on this GPU. The weight of the start is chosen among
  these four, by leaving each of them out in turn, and the share of the measured time in which all requests run is theirs too:
  the predicted point has no part in either. The result with the weight that the
  profiler uses, which was chosen with all five, is stated too.
- How large is it on engines whose few points correct the model in the same way? Of every engine of the file with five points or
  more, each point of up to five is predicted from the other four.
- How do prefill and decode steps compare with a profile that the released profiler measured (H200, Llama 3.1 8B in FP8)? None
  of its points is used in a fit.

The efficiencies of `dynamo.profiler.perf.efficiencies` are what the fit to all points prints.
"""

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.peer import peer_python
from benchmarks.report import print_line, table, write_result
from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.planner.profile_data import read_decode_profile, read_prefill_profile
from dynamo.profiler.perf.analytic_engine import AnalyticEngine, Efficiency
from dynamo.profiler.perf.calibration import EnginePoint, closed_loop, errors, fit
from dynamo.profiler.perf.efficiencies import EFFICIENCIES
from dynamo.profiler.perf.gpus import gpu_spec
from dynamo.profiler.perf.known_models import known_config
from dynamo.profiler.perf.model_shape import model_shape

POINTS = Path(__file__).with_name("measured_engines.csv")
BITS = {"fp8": 8.0, "fp4": 4.5, "bf16": 16.0, "int4": 4.25}
PRIOR = Efficiency()
B200_MODEL, B200_GPU = "MiniMaxAI/MiniMax-M2.5", "b200_sxm"
B200_POINTS = (
    (4, 121.5, 9.58, 99.8),
    (8, 100.7, 10.12, 191.1),
    (16, 117.0, 12.31, 314.8),
    (32, 146.1, 16.32, 474.6),
    (64, 220.4, 20.64, 747.1),
)
"""Concurrency, TTFT in ms, TPOT in ms, tokens per second and GPU; prompts and answers of 1,024 tokens, four GPUs."""
WEIGHTS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Weights of the start that are tried."""
FEW = 5
"""Points of one engine that correct each other."""
PUBLISHED = {"tok_s": 5.8, "tpot_ms": 7.7, "ttft_ms": 14.7}
"""AIConfigurator's own mean absolute errors on the same five points, in percent."""
PROFILE = "dynamo/planner/tests/data/profiling_results/H200_TP1P_TP1D"
"""Measured profile in the released wheel."""


def engine_of(model: str, gpu: str, precision: str, parallel: PickedParallelConfig) -> AnalyticEngine:
    """Return the model of an engine, with uncorrected efficiencies."""
    shape = replace(model_shape(known_config(model) or {}, model), weight_bits=BITS[precision])
    return AnalyticEngine(shape=shape, gpu=gpu_spec(gpu), parallel=parallel, efficiency=PRIOR)


def measured() -> dict[tuple[str, str, str], list[EnginePoint]]:
    """Return the points by backend, model and GPU."""
    found: dict[tuple[str, str, str], list[EnginePoint]] = defaultdict(list)
    with POINTS.open() as file:
        for row in csv.DictReader(file):
            widths = {axis: int(row[axis]) for axis in ("tp", "pp", "dp", "moe_tp", "moe_ep")}
            point = EnginePoint(
                engine=engine_of(row["model"], row["gpu"], row["precision"], PickedParallelConfig(**widths)),
                isl=int(row["isl"]),
                osl=int(row["osl"]),
                batch=int(row["batch"]),
                ttft_ms=float(row["ttft_ms"]),
                tpot_ms=float(row["tpot_ms"]),
            )
            found[row["backend"], row["model"], row["gpu"]].append(point)
    return found


def summary(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return median, mean and 90th percentile of the absolute errors in percent."""
    result: dict[str, float] = {"points": len(found)}
    for at, name in ((0, "ttft"), (1, "tpot")):
        values = sorted(100 * abs(one[at]) for one in found)
        result[f"{name}_median"] = statistics.median(values)
        result[f"{name}_mean"] = statistics.mean(values)
        result[f"{name}_p90"] = values[int(0.9 * (len(values) - 1))]
    return {name: round(value, 1) for name, value in result.items()}


def left_out(groups: dict[tuple[str, str, str], list[EnginePoint]], backend: str) -> dict[str, Any]:
    """Return the errors on each pair of model and GPU by a fit to all other pairs."""
    mine = {key: points for key, points in groups.items() if key[0] == backend}
    rows, all_errors = {}, []
    for key, points in mine.items():
        others = [one for other, group in mine.items() if other != key for one in group]
        found = errors(points, fit(others, PRIOR))
        rows[f"{key[1]} on {key[2]}"] = summary(found)
        all_errors += found
        print_line(f"{backend}: {key[1]} on {key[2]} left out: TPOT {rows[f'{key[1]} on {key[2]}']['tpot_median']} %")
    return {"all": summary(all_errors), "by engine": rows}


def b200(groups: dict[tuple[str, str, str], list[EnginePoint]]) -> dict[str, Any]:
    """Return the errors on NVIDIA's five points: without any of them, and each from the other four."""
    engine = engine_of(B200_MODEL, B200_GPU, "fp8", PickedParallelConfig(tp=4, moe_tp=4))
    points = [
        EnginePoint(engine=engine, isl=1024, osl=1024, batch=batch, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        for batch, ttft_ms, tpot_ms, _ in B200_POINTS
    ]
    others = [
        one
        for (backend, model, gpu), group in groups.items()
        if backend == "vllm" and (model, gpu) != (B200_MODEL, B200_GPU)
        for one in group
    ]
    start = fit(others, PRIOR)
    without = [_row(point, start, truth[3]) for point, truth in zip(points, B200_POINTS, strict=True)]
    nested, each, weights = [], [], []
    for point, truth in zip(points, B200_POINTS, strict=True):
        known = [one for one in points if one is not point]
        weights.append(chosen_weight(known, start))
        share = busy_share(known)
        nested.append(_row(point, fit(known, start, weights[-1]), truth[3], share))
        each.append(_row(point, fit(known, start), truth[3], share))
    return {
        "uncorrected": {"points": without, "mean absolute error %": _means(without)},
        "left out": {"points": nested, "weights": weights, "mean absolute error %": _means(nested)},
        "left out with the profiler's weight": {"points": each, "mean absolute error %": _means(each)},
        "published": PUBLISHED,
    }


def chosen_weight(points: Sequence[EnginePoint], start: Efficiency) -> float:
    """Return the weight of the start with the smallest mean error on points that are left out in turn."""

    def mean_error(weight: float) -> float:
        found = [
            abs(one)
            for point in points
            for pair in errors([point], fit([one for one in points if one is not point], start, weight))
            for one in pair
        ]
        return statistics.mean(found)

    return min(WEIGHTS, key=mean_error)


def corrected_engines(groups: dict[tuple[str, str, str], list[EnginePoint]], backend: str) -> dict[str, Any]:
    """Return the errors on engines whose other points correct a fit to the pairs of model and GPU that are not theirs."""
    before: list[tuple[float, float]] = []
    after: list[tuple[float, float]] = []
    for key, group in groups.items():
        if key[0] != backend:
            continue
        others = [one for other, points in groups.items() if other[0] == backend and other != key for one in points]
        start = fit(others, PRIOR)
        engines: dict[AnalyticEngine, list[EnginePoint]] = defaultdict(list)
        for point in group:
            engines[point.engine].append(point)
        for points in engines.values():
            few = sorted(points, key=lambda one: (one.isl, one.osl, one.batch))
            few = [few[at * (len(few) - 1) // (FEW - 1)] for at in range(FEW)] if len(few) >= FEW else []
            for point in few:
                before += errors([point], start)
                after += errors([point], fit([one for one in few if one is not point], start))
    return {"uncorrected": summary(before), "each from four others": summary(after)}


def busy_share(points: Sequence[EnginePoint]) -> float:
    """Return the mean ratio of the measured throughput to that of the measured latencies.

    It is below one: at the start and the end of a measurement fewer requests run.
    """
    rates = {batch: tok_s for batch, _, _, tok_s in B200_POINTS}
    return statistics.mean(
        rates[one.batch] / _rate(one.batch, one.osl, one.ttft_ms, one.tpot_ms, one.engine.gpus) for one in points
    )


def _rate(batch: int, osl: int, ttft_ms: float, tpot_ms: float, gpus: int) -> float:
    """Return the tokens per second and GPU of a closed loop."""
    return 1000 * batch * osl / (ttft_ms + tpot_ms * (osl - 1)) / gpus


def _row(point: EnginePoint, efficiency: Efficiency, tok_s: float, share: float = 1.0) -> dict[str, float]:
    engine = replace(point.engine, efficiency=efficiency)
    ttft_ms, tpot_ms = closed_loop(engine, point.isl, point.osl, point.batch)
    rate = share * _rate(point.batch, point.osl, ttft_ms, tpot_ms, engine.gpus)
    values = {
        "batch": point.batch,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "tok_s": rate,
        "ttft_ms error %": 100 * (ttft_ms / point.ttft_ms - 1),
        "tpot_ms error %": 100 * (tpot_ms / point.tpot_ms - 1),
        "tok_s error %": 100 * (rate / tok_s - 1),
    }
    return {name: round(value, 2) for name, value in values.items()}


def _means(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    rows = list(rows)
    return {name: round(statistics.mean(abs(row[f"{name} error %"]) for row in rows), 1) for name in PUBLISHED}


def profile(start: Efficiency) -> dict[str, Any] | None:
    """Return the errors on a profile that the released profiler measured; None without the released package."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    directory = Path(peer_python()).parent.parent / "lib" / version / "site-packages" / PROFILE
    if not directory.is_dir():
        return None
    engine = engine_of("nvidia/Llama-3.1-8B-Instruct-FP8", "h200_sxm", "fp8", PickedParallelConfig())
    engine = replace(engine, efficiency=start)
    prefill, decode = read_prefill_profile(str(directory)), read_decode_profile(str(directory))
    prefill_errors = [
        100 * abs((engine.prefill_ms(round(isl)) + engine.request_ms()) / ttft_ms - 1)
        for isl, ttft_ms in zip(prefill.isl, prefill.ttft_ms, strict=True)
    ]
    decode_errors = []
    for usage, context, itl_ms in zip(decode.kv_usage, decode.context_length, decode.itl_ms, strict=True):
        tokens = usage * decode.max_kv_tokens
        found_ms = engine.decode_ms(round(tokens), int(decode.max_kv_tokens), max(1, round(tokens / context)))
        decode_errors.append(100 * abs(found_ms / itl_ms - 1))
    capacity = engine.kv_tokens()
    return {
        "prefill TTFT median error %": round(statistics.median(prefill_errors), 1),
        "decode ITL median error %": round(statistics.median(decode_errors), 1),
        "cache tokens": capacity,
        "cache tokens measured": int(decode.max_kv_tokens),
        "cache error %": round(100 * (capacity / decode.max_kv_tokens - 1), 1),
    }


def main() -> int:
    """Print the errors; return 1 where those on NVIDIA's points exceed AIConfigurator's, or the shipped efficiencies are old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only NVIDIA's points and the measured profile")
    options = parser.parse_args()
    groups = measured()
    found: dict[str, Any] = {"b200": b200(groups), "h200 profile": profile(EFFICIENCIES["vllm"].efficiency)}
    if not options.quick:
        found["left out"] = {backend: left_out(groups, backend) for backend in EFFICIENCIES}
        found["corrected"] = {}
        for backend in EFFICIENCIES:
            found["corrected"][backend] = corrected_engines(groups, backend)
            print_line(f"{backend}, engines corrected by four points: {found['corrected'][backend]}")
        fitted = {}
        for backend in EFFICIENCIES:
            one = fit([point for key, group in groups.items() if key[0] == backend for point in group], PRIOR)
            fitted[backend] = {name: float(f"{value:.3g}") for name, value in asdict(one).items()}
        found["efficiencies"] = fitted
        rows = [[backend, *map(str, one["all"].values())] for backend, one in found["left out"].items()]
        print_line(table(["backend", *found["left out"]["vllm"]["all"]], rows))
        for backend, values in fitted.items():
            print_line(f"{backend}: {values}")
    means = found["b200"]["left out"]["mean absolute error %"]
    print_line(f"B200 points, each from the others: {means}; AIConfigurator: {PUBLISHED}")
    tuned = found["b200"]["left out with the profiler's weight"]["mean absolute error %"]
    print_line(f"B200 points, each from the others, with the profiler's weight: {tuned}")
    print_line(f"B200 points, without any: {found['b200']['uncorrected']['mean absolute error %']}")
    print_line(f"H200 profile: {found['h200 profile']}")
    print_line(write_result("engine_accuracy", found, is_whole=not options.quick))
    is_current = options.quick or all(
        abs(found["efficiencies"][backend][name] / value - 1) < 0.02
        for backend, one in EFFICIENCIES.items()
        for name, value in asdict(one.efficiency).items()
    )
    return int(not is_current or any(means[name] > limit for name, limit in PUBLISHED.items()))


if __name__ == "__main__":
    sys.exit(main())
