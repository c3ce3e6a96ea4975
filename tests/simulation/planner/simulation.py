"""Simulation of the production planner service on a simulated deployment, and its invariants for every seed."""

import asyncio
import math

from tests.simulation.planner.deployment import REQUEST_S, SimulatedDeployment, profile
from tests.simulation.planner.scenario import BUDGET, END_S, FAULTS_END_S, PlannerScenario, drawn
from tests.simulation.planner.virtual_time import SkewedClock, run_virtual

from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.perf_model import EngineRole
from dynamo.planner.config.planner_config import parse
from dynamo.planner.decision_log import DecisionLog, DecisionSummary
from dynamo.planner.observation.observer import Observer
from dynamo.planner.plugin_transport.host import PluginHost
from dynamo.planner.plugins.types import AcceptResult, ProposeStageRequest, ProposeStageResponse
from dynamo.planner.service import PlannerParts, PlannerService

UNOBSERVED = {"observations gone", "observations hang", "workers unknown"}
hanging = False
"""Whether `SimulatedPlugin` hangs."""


class SimulatedPlugin:
    """Accepts all proposals, or never returns."""

    async def Propose(self, request: ProposeStageRequest) -> ProposeStageResponse:
        if hanging:
            await asyncio.get_running_loop().create_future()
        return ProposeStageResponse(accept=AcceptResult())


PLUGIN = {"module": __name__, "class": "SimulatedPlugin", "plugin_id": "sim", "plugin_type": "propose", "priority": 50}


class PlannerSimulation:
    """One seed: a planner, the faults, and a second planner while that fault is active."""

    def __init__(self, seed: int) -> None:
        self.scenario = drawn(seed)
        self.violations: list[str] = []
        self.events: list[str] = []
        self.clock = SkewedClock()
        self.deployment = SimulatedDeployment(self.scenario)

    def run(self) -> "PlannerSimulation":
        """Run to the end in virtual time."""
        run_virtual(self._run())
        return self

    async def _run(self) -> None:
        self.deployment.began_s = asyncio.get_running_loop().time()
        planner = await self._planner("")
        second: PlannerService | None = None
        has_restarted = has_jumped = False
        while self.deployment.elapsed_s < END_S:
            await asyncio.sleep(5.0)
            self.deployment.advance()
            active = self.deployment.active
            globals()["hanging"] = "plugin hangs" in active
            if "clock jump" in active and not has_jumped:
                self.clock.ahead_s += self.deployment.rng.choice((0.0, 600.0, 86400.0))
                self.clock.wall_s = self.deployment.rng.choice((-86400.0, 3600.0))
            has_jumped = "clock jump" in active
            if "planner restarts" in active and not has_restarted:
                await planner.close()
                planner = await self._planner("")
            has_restarted = "planner restarts" in active
            if "second planner" in active:
                second = second or await self._planner("planner 1 of the same namespace has precedence")
                await self._tick(second, is_second=True)
            elif second is not None:
                await second.close()
                second = None
            await self._tick(planner)
        await planner.close()
        self._check_end()

    async def _planner(self, hold: str) -> PlannerService:
        config = parse({**self.scenario.settings, "plugin_registration": {"in_process_plugins": [PLUGIN]}})

        async def preceding() -> str:
            return hold

        service = PlannerService(
            config,
            PlannerParts(
                connector=self.deployment,
                observer=Observer(self.deployment, self.deployment, self.deployment, self.clock),
                registry=MetricsRegistry(),
                log=DecisionLog(None),
                clock=self.clock,
                plugins=PluginHost(config, self.clock.now),
                hold=preceding,
            ),
        )
        await service.start(await self.deployment.capabilities(), {EngineRole.AGGREGATED: profile()})
        return service

    async def _tick(self, planner: PlannerService, *, is_second: bool = False) -> None:
        before, began_s = len(self.deployment.requested), self.deployment.elapsed_s
        try:
            done = await planner.tick()
        except Exception as error:
            self._violated(f"a tick raised {type(error).__name__}: {error}")
            return
        requested = self.deployment.requested[before:]
        self.events.append(
            f"{began_s:7.1f} {'second ' if is_second else ''}{sorted(self.deployment.active)} {done.line}"
        )
        if self.deployment.elapsed_s - began_s > 120:
            self._violated(f"a tick took {self.deployment.elapsed_s - began_s:.0f} s")
        for target in requested:
            if not 1 <= target <= BUDGET:
                self._violated(f"requested {target} replicas")
        if is_second and requested:
            self._violated("a planner that another one precedes scaled")
        self._check_reasons(done)

    def _check_reasons(self, done: DecisionSummary) -> None:
        """Check that every tick has a reason, and that what failed is named."""
        active = self.deployment.active
        if done.load_reason in ("", "unset") and done.throughput_reason in ("", "unset"):
            self._violated("a tick has no reason")
        if active & UNOBSERVED and not done.unknown:
            self._violated(f"{sorted(active & UNOBSERVED)}: not reported as unknown")
        if "workers unknown" in active and done.outcome == "accepted":
            self._violated("scaled although the numbers of workers are unknown")
        if done.scale_to is not None and done.outcome in ("failed", "held") and not done.message:
            self._violated(f"scale request {done.outcome} without a cause")

    def _check_end(self) -> None:
        """Check that the planner has recovered from the faults."""
        work, ready = self.scenario.rate * REQUEST_S, self.deployment.ready
        if ready < 1:
            self._violated("no replicas at the end")
        if self.scenario.policy == "forecast" and not math.ceil(work / 0.9) <= ready <= math.ceil(work / 0.6) + 1:
            self._violated(
                f"{ready} replicas {END_S - FAULTS_END_S:.0f} s after the faults, for the work of {work:.1f}"
            )

    def _violated(self, text: str) -> None:
        self.violations.append(f"{self.deployment.elapsed_s:.0f} s: {text}")


def check(seed: int) -> list[str]:
    """Return the violations of one seed."""
    return PlannerSimulation(seed).run().violations


def describe(seed: int) -> tuple[list[str], list[str], PlannerScenario]:
    """Return events, violations and scenario of one seed."""
    simulation = PlannerSimulation(seed).run()
    return simulation.events, simulation.violations, simulation.scenario
