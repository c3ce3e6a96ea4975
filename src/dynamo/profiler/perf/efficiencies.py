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
            compute=0.656,
            memory=0.908,
            layer_s=5.77e-05,
            step_s=0.000348,
            expert_layer_s=3.32e-05,
            request_s=6.12e-06,
            prompt_s=0.0226,
            closed_prompts=1.68,
            closed_start=0.0979,
        ),
        tpot_error=0.11,
        ttft_error=0.34,
        source="929 published closed-loop measurements of vllm",
    ),
    "sglang": BackendEfficiency(
        efficiency=Efficiency(
            compute=0.695,
            memory=0.95,
            layer_s=1.78e-05,
            step_s=0.00105,
            expert_layer_s=0.000104,
            request_s=3.04e-05,
            prompt_s=0.185,
            closed_prompts=1.19,
            closed_start=0.368,
        ),
        tpot_error=0.17,
        ttft_error=0.6,
        source="442 published closed-loop measurements of sglang",
    ),
    "trtllm": BackendEfficiency(
        efficiency=Efficiency(
            compute=0.64,
            memory=0.95,
            layer_s=4.47e-05,
            step_s=0.000638,
            expert_layer_s=4.38e-05,
            request_s=1.35e-05,
            prompt_s=0.0645,
            closed_prompts=2.5,
            closed_start=0.0972,
        ),
        tpot_error=0.17,
        ttft_error=0.34,
        source="1193 published closed-loop measurements of trtllm",
    ),
}
"""By backend; `python -m benchmarks.engine_accuracy` prints the fit and the errors."""
