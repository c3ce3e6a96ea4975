"""Scenario of one seed: settings, load and faults of a planner and its deployment."""

import random
from dataclasses import dataclass

FAULT_KINDS = (
    "observations gone",
    "observations hang",
    "values not finite",
    "stale series",
    "duplicated series",
    "clock jump",
    "workers flap",
    "scale never completes",
    "connector errors",
    "connector hangs",
    "plugin hangs",
    "planner restarts",
    "second planner",
    "workers unknown",
)
FAULTS_END_S, END_S = 600.0, 1800.0
BUDGET = 8


@dataclass(frozen=True, slots=True)
class PlannerFault:
    """A fault and its time."""

    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PlannerScenario:
    """Everything that is drawn from a seed before the run."""

    seed: int
    policy: str
    startup_s: float
    rate: float
    """Requests per second after the faults."""
    workers: int
    faults: tuple[PlannerFault, ...]

    @property
    def settings(self) -> dict[str, object]:
        """The planner's configuration."""
        return {
            "environment": "virtual",
            "mode": "agg",
            "namespace": "ns",
            "optimization_target": "sla",
            "load_predictor": "constant",
            "scaling_policy": self.policy,
            "ttft_ms": 2000,
            "itl_ms": 50,
            "load_adjustment_interval": 5,
            "max_gpu_budget": BUDGET,
            "decode_engine_num_gpu": 1,
        }


def drawn(seed: int) -> PlannerScenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"planner {seed}")
    faults = []
    for _ in range(rng.randint(1, 6)):
        begin_s = rng.uniform(30.0, FAULTS_END_S - 60.0)
        end_s = min(FAULTS_END_S, begin_s + rng.choice((5.0, 20.0, 60.0, 300.0)))
        faults.append(PlannerFault(rng.choice(FAULT_KINDS), begin_s, end_s))
    return PlannerScenario(
        seed=seed,
        policy=rng.choice(("forecast", "forecast", "standard")),
        startup_s=rng.choice((5.0, 30.0, 90.0)),
        rate=rng.choice((2.0, 6.0, 12.0)),
        workers=rng.randint(1, BUDGET),
        faults=tuple(sorted(faults, key=lambda fault: fault.begin_s)),
    )
