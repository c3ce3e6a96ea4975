"""Efficiencies: what published measurements of each backend show, and how large the errors are on other engines."""

from dataclasses import dataclass

from dynamo.profiler.perf.analytic_engine import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEfficiency:
    """Efficiencies of a backend's engines, with relative errors on models and GPUs that were left out of the fit."""

    efficiency: Efficiency
    tpot_error: float
    """Median relative error of TPOT, 0 to 1."""
    ttft_error: float
    """Median relative error of TTFT, 0 to 1."""
    source: str


EFFICIENCIES = {
    "vllm": BackendEfficiency(
        efficiency=Efficiency(
            compute=0.646,
            memory=0.909,
            layer_s=6.38e-05,
            step_s=9.39e-05,
            expert_layer_s=3.57e-05,
            request_s=4.79e-06,
            prompt_s=0.0249,
            closed_prompts=1.6,
            closed_start=0.0976,
        ),
        tpot_error=0.11,
        ttft_error=0.34,
        source="929 published closed-loop measurements of vllm",
    ),
    "sglang": BackendEfficiency(
        efficiency=Efficiency(
            compute=0.7,
            memory=0.95,
            layer_s=1.35e-05,
            step_s=0.00105,
            expert_layer_s=0.000108,
            request_s=3.23e-05,
            prompt_s=0.215,
            closed_prompts=0.732,
            closed_start=0.372,
        ),
        tpot_error=0.17,
        ttft_error=0.5,
        source="442 published closed-loop measurements of sglang",
    ),
    "trtllm": BackendEfficiency(
        efficiency=Efficiency(
            compute=0.635,
            memory=0.95,
            layer_s=4.7e-05,
            step_s=0.000498,
            expert_layer_s=4.43e-05,
            request_s=1.46e-05,
            prompt_s=0.0683,
            closed_prompts=2.41,
            closed_start=0.097,
        ),
        tpot_error=0.16,
        ttft_error=0.35,
        source="1193 published closed-loop measurements of trtllm",
    ),
}
"""By backend; `python -m benchmarks.engine_accuracy` prints the fit and the errors."""
