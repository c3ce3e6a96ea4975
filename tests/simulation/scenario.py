"""Scenario of one seed: the processes, the requests, and the faults with their times."""

import random
from dataclasses import dataclass, field

from tests.simulation.engine import EngineBehavior
from tests.simulation.network import NetworkFaults

from dynamo.routing.busy import Thresholds

HEAL_AT_S = 22.0
"""Time at which all faults end; faults and requests come before."""
CALM_ODDS = 0.1
ROLES_ODDS = 0.25
"""Share of scenarios with prefill and decode workers."""

FAULTS = {
    "kill worker": 4,
    "lose machine of worker": 2,
    "stop worker": 3,
    "start worker": 3,
    "start worker with another card": 1,
    "break links": 3,
    "cut worker from frontend": 4,
    "cut worker from registry": 3,
    "cut frontend from registry": 2,
    "pause worker": 3,
    "pause frontend": 1,
    "stick engine": 2,
    "break engine": 2,
    "kill frontend": 1,
    "stop frontend": 1,
}
"""Weight of each kind of fault."""


@dataclass(frozen=True)
class Fault:
    """Fault, and its duration if it is temporary."""

    at_s: float
    kind: str
    one: float
    other: float
    """Two numbers from 0 to 1 that select a worker and a frontend."""
    lasts_s: float


@dataclass
class Scenario:
    """Everything that is drawn before a run."""

    seed: int
    is_calm: bool = False
    frontends: int = 1
    workers: dict[str, int] = field(default_factory=dict)
    """Number of workers of each model."""
    prefills: int = 0
    """Prefill workers of the first model; 0 for aggregated workers."""
    meets: bool = False
    """Whether both phases of its requests are sent at once."""
    prefills_locally: bool = False
    """Whether its decode workers can compute a prompt themselves."""
    has_sockets: bool = False
    """Whether the request plane is TCP."""
    router_mode: str = "round-robin"
    migrations: int = 0
    migrated_tokens_max: int | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    slots: int | None = None
    silence_s: float = 6.0
    lease_s: float = 4.0
    resync_s: float = 2.0
    network_faults: NetworkFaults = field(default_factory=NetworkFaults)
    requests: int = 0
    leavers: float = 0.0
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int) -> "Scenario":
        rng = random.Random(f"scenario {seed}")
        scenario = cls(seed, is_calm=rng.random() < CALM_ODDS)
        scenario.has_sockets = rng.random() < 0.5
        scenario.frontends = rng.choice((1, 1, 2, 2, 3))
        scenario.workers = {"alpha": rng.randint(1, 4)}
        if rng.random() < 0.25:
            scenario.workers["beta"] = rng.randint(1, 2)
        scenario.router_mode = rng.choice(("round-robin", "random", "power-of-two", "least-loaded", "kv"))
        roles = random.Random(f"roles {seed}")
        if roles.random() < ROLES_ODDS:
            scenario.prefills = roles.randint(1, 3)
            scenario.meets, scenario.prefills_locally = roles.random() < 0.3, roles.random() < 0.3
        scenario.migrations = rng.choice((0, 1, 3, 8, 8))
        scenario.migrated_tokens_max = rng.choice((None, None, None, 30))
        scenario.silence_s = rng.uniform(3.0, 9.0)
        scenario.lease_s = rng.uniform(2.0, 8.0)
        scenario.resync_s = rng.uniform(0.5, 3.0)
        scenario.requests = rng.randint(6, 36)
        if rng.random() < 0.25:
            scenario.slots = rng.randint(1, 4)
        if scenario.is_calm:
            return scenario
        if rng.random() < 0.2:
            scenario.thresholds = Thresholds(active_decode_blocks_threshold=rng.uniform(0.2, 0.9))
        scenario.leavers = rng.choice((0.0, 0.2, 0.5))
        scenario.network_faults = NetworkFaults(
            loss=rng.choice((0.0, 0.05, 0.3)),
            doubling=rng.choice((0.0, 0.2)),
            latency_s=rng.choice((0.0005, 0.005, 0.05)),
            spike=rng.choice((0.0, 0.02, 0.1)),
            notice_s=rng.uniform(0.5, 5.0),
        )
        kinds, weights = list(FAULTS), list(FAULTS.values())
        for _ in range(rng.randint(0, 10)):
            scenario.faults.append(
                Fault(
                    at_s=rng.uniform(2.0, HEAL_AT_S - 2.0),
                    kind=rng.choices(kinds, weights)[0],
                    one=rng.random(),
                    other=rng.random(),
                    lasts_s=rng.choice((0.05, 0.5, 2.0, 6.0, 15.0)) * rng.uniform(0.5, 1.5),
                )
            )
        return scenario


def draw_behavior(rng: random.Random, *, is_calm: bool) -> EngineBehavior:
    """Draw the behavior of one engine."""
    return EngineBehavior(
        gap_s=rng.choice((0.005, 0.04, 0.1, 0.2)),
        batch_max=rng.choice((1, 1, 4)),
        is_bare=rng.random() < 0.5,
        stall=0.0 if is_calm else rng.choice((0.0, 0.02)),
        stall_s=rng.uniform(0.5, 12.0),
    )
