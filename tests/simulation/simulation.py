"""Simulation: one seeded run of production frontends and workers on an unreliable network, with clients.

draw a scenario ─▶ start ─▶ requests and faults ─▶ heal ─▶ settle ─▶ probe ─▶ check idle state ─▶ shut down ─▶ check end
state
"""

import asyncio
import hashlib
import json
import logging
import math
import random
from collections import Counter
from typing import Any, cast

from tests.simulation import invariants
from tests.simulation.clients import PlannedRequest, SentRequest, SimExchange, Wire, draw_body
from tests.simulation.determinism import determinism, load_once, make_card_once
from tests.simulation.engine import CONTEXT_LENGTH, Language, SimEngine
from tests.simulation.event_network import EventNetwork, SimBus
from tests.simulation.loop import STARTS_AT_S, Process, SimLoop, Stalled
from tests.simulation.network import Network
from tests.simulation.registry import Registry, SimDiscovery
from tests.simulation.request_plane import ObservedReceiver, PlaneObserver, SimPlane, SocketPlane
from tests.simulation.scenario import HEAL_AT_S, Fault, Scenario, draw_behavior
from tests.simulation.sockets import Sockets

from dynamo.backend.config import DisaggregatedOptions, WorkerOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.backend.worker import EngineWorker
from dynamo.core.logging import current_request
from dynamo.http.server.service import SWEEP_S
from dynamo.model_card.asset_cache import AssetCache
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.memory import MemoryEventPlane
from dynamo.runtime.push_router import RouterMode
from dynamo.serving.answers import BaseAnswer
from dynamo.serving.generation import Generation
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import MigrationPolicy
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.prefill_router import LAST_WORDS_S, SEQUENTIAL_MODES
from dynamo.text.detokenizer import TokenTable
from dynamo.text.tokenizer.tokenizer import BACKENDS

START_S = 2.0  # All processes have loaded and discovered each other by then.
SETTLE_S = 24.0  # The longest silence, lease, detection and inhibition, one after another.
PROBE_GAP_S = 1.5  # The slowest engine with one slot has answered one probe before the next arrives.
PROBE_S = 35.0
STOP_S = 40.0
GRACE_S = 1.0
DRAIN_S = 3.0
OTHER_PARSER = "hermes"  # Gives a card another checksum without other effects here.
LOST_S = 10.0  # More than the lease and delays: connection attempts that hang.
BATCHED = 0.7  # Share of members that use batched frames; the others use upstream's framing.


class Member:
    """Production process: its runtime on the simulated planes."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.process = Process(simulation.loop, name)
        self.opened = asyncio.Event()
        self.is_stopping = False
        self.runtime: DistributedRuntime
        self.discovery: SimDiscovery
        self.plane: SimPlane | SocketPlane
        self.process.start(self._live(), "live")

    @property
    def is_alive(self) -> bool:
        return not self.process.is_dead

    @property
    def is_up(self) -> bool:
        """Whether the process is alive, ready and not stopping."""
        return self.is_alive and self.opened.is_set() and not self.is_stopping

    def _open(self) -> DistributedRuntime:
        simulation, process = self.simulation, self.process
        self.discovery = SimDiscovery(simulation.registry, process)

        def plane(dispatcher: Any, registry: Any) -> SimPlane | SocketPlane:
            observer = PlaneObserver(process, self.discovery, simulation)
            if simulation.scenario.has_sockets:
                self.plane = SocketPlane(dispatcher, observer, registry, batched=simulation.rng.random() < BATCHED)
            else:
                self.plane = SimPlane(dispatcher, simulation.network, observer)
            return self.plane

        bus = SimBus(simulation.event_network, process)
        return DistributedRuntime(None, self.discovery, plane, event_plane=lambda _: MemoryEventPlane(bus))

    async def _live(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Send SIGTERM."""
        if self.is_alive and not self.is_stopping:
            self.is_stopping = True
            self.process.start(self._stop(), "stop")

    async def _stop(self) -> None:
        await self.opened.wait()
        await self._end()
        left = [task.get_name() for task in self.process.tasks if task is not asyncio.current_task()]
        if left:
            self.simulation.violation(f"{self.name} ended and left {', '.join(left)}")
        self.simulation.log(self.name, "exits")
        self.kill()

    def kill(self, *, response: bool = True) -> None:
        """Send SIGKILL, or, if the kernel sends no resets, fail the machine."""
        if self.is_alive:
            self.process.kill()
            self.simulation.network.remove_process(self.process, response=response)
            self.simulation.deaths[self.runtime.instance_id] = self.simulation.loop.time()


class FrontendMember(Member):
    """The parts of `dynamo.frontend.main.serve` without the socket."""

    async def _live(self) -> None:
        scenario = self.simulation.scenario
        self.runtime = runtime = self._open()
        self.metrics = FrontendMetrics(runtime.metrics)
        self.models = Models(runtime, self.metrics, router_mode=scenario.router_mode, thresholds=scenario.thresholds)
        policy = MigrationPolicy(scenario.migrations, scenario.migrated_tokens_max)
        self.pipeline = Pipeline(self.models, self.metrics, policy)
        await runtime.connect()
        self.models.start()
        await self.models.wait_synced(5.0)
        self._sweep()
        self.opened.set()

    def _sweep(self) -> None:
        """Sweep as `HttpService` does."""
        self.pipeline.abandon(self.simulation.scenario.silence_s)
        self._sweeper = self.simulation.loop.call_later(SWEEP_S, self._sweep)

    async def _end(self) -> None:
        await self.pipeline.drain(5.0)
        self._sweeper.cancel()
        await self.models.close()
        await self.runtime.shutdown()

    def take(self, sent: SentRequest) -> None:
        """Handle a request that arrived completely."""
        handle = self.pipeline.handle_chat if sent.plan.is_chat else self.pipeline.handle_completion
        handle(sent.exchange)


class WorkerMember(Member):
    """The parts of `dynamo.backend.process.WorkerProcess` with a simulated engine."""

    def __init__(
        self, simulation: "Simulation", name: str, model: str, tool_parser: str | None, role: DisaggregationMode
    ) -> None:
        self.model = f"{model} prefill" if role is DisaggregationMode.PREFILL else model
        self._served = model
        self._role = role
        self._tool_parser = tool_parser
        behavior = draw_behavior(simulation.rng, is_calm=simulation.scenario.is_calm)
        rng = random.Random(f"engine {simulation.scenario.seed} {name}")
        self.engine = SimEngine(
            simulation.language,
            model,
            behavior,
            rng,
            simulation.on_token_generated,
            role=role,
            meets=simulation.scenario.meets and role is DisaggregationMode.PREFILL,
            prefills_locally=simulation.scenario.prefills_locally and role is DisaggregationMode.DECODE,
        )
        self.engine.is_healed = simulation.is_healed
        self.served_s = math.inf
        """Time since which it serves."""
        super().__init__(simulation, name)

    async def _live(self) -> None:
        self.runtime = runtime = self._open()
        place = f"{self._served}_prefill" if self._role is DisaggregationMode.PREFILL else self._served
        options = DisaggregatedOptions(
            disaggregation_mode=self._role.value,
            namespace="sim",
            endpoint=f"sim.{place}.generate",
            engine_request_limit=self.simulation.scenario.slots,
            tool_call_parser=self._tool_parser,
        )
        self.worker = EngineWorker(options, self.engine, runtime, on_failure=lambda _: self.stop())
        self.simulation.names[runtime.instance_id] = self.name
        await runtime.connect()
        await self.worker.start()
        self.opened.set()
        self.served_s = self.simulation.loop.time()
        self.simulation.log(self.name, f"serves {self.model} as {runtime.instance_id:x}")

    async def _end(self) -> None:
        await self.worker.stop(GRACE_S, DRAIN_S)


class Simulation:
    """Simulation of one seed."""

    def __init__(self, seed: int) -> None:
        self.scenario = scenario = Scenario.draw(seed)
        self.rng = random.Random(f"world {seed}")
        self.loop = SimLoop(random.Random(f"order {seed}"))
        self.violations: list[str] = []
        self.events: list[str] = []
        self.language = language()
        self.driver = Process(self.loop, "network")
        rng = random.Random(f"network {seed}")
        self.network = Network(self.loop, rng, scenario.network_faults, self.driver, is_calm=scenario.is_calm)
        self.event_network = EventNetwork(self.network)
        self.loop.sockets = Sockets(self.network)
        self.frontends: list[FrontendMember] = []
        self.workers: list[WorkerMember] = []
        self.requests: list[SentRequest] = []
        self.names: dict[int, str] = {}
        """Process name of each instance id."""
        self.deaths: dict[int, float] = {}
        """Time at which the process of each instance id ended."""
        self.by_part: dict[str, SentRequest] = {}
        """Request of each request id that workers receive."""
        self.prefills: list[str] = []
        """Request ids of prefills, once for each start."""
        self.disturbances: list[list[Any]] = []
        """Name of a process or of a pair, begin, and end or None: times at which messages may be delayed."""
        self.counts: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        """Counts of events, after the run."""
        self.is_healed = False
        self._numbers = {"w": 0, "f": 0, "r": 0}

    # Observations -------------------------------------------------------------------------------------------------

    def log(self, who: str, what: str) -> None:
        if self.loop.is_closed():
            return  # Events while the resources of dead processes are closed.
        self.events.append(f"{self.loop.time() - STARTS_AT_S:10.4f}  {who:<9} {what}")

    def violation(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)
            self.log("!!!", what)

    def digest(self) -> str:
        """Return a hash that is equal for runs with the same events at the same times."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()

    def _count(self) -> Counter[str]:
        """Count the events."""
        network = self.network
        prefills = Counter(self.prefills)
        seen = Counter({f"fault: {kind}": number for kind, number in self.counts.items()})
        seen.update({"prefills done": len(prefills), "prefills done again": len(self.prefills) - len(prefills)})
        seen.update({"messages lost": network.lost, "doubled": network.doubled, "held back": network.held})
        for sent in self.requests:
            if sent.ended_s is None:
                seen["clients that left"] += 1
                continue
            verdict = invariants.verdict(sent)
            seen[f"answers {verdict}"] += 1
            seen["streams that moved"] += verdict == "complete" and sent.resumed > 0
        return seen

    def on_log(self, record: logging.LogRecord) -> None:
        """Record a warning of production code; an unexpected error is a violation."""
        if self.loop.is_closed():
            return
        text = record.getMessage()
        self.log("log", f"{record.levelname.lower()} {record.name.removeprefix('dynamo.')}: {text}")
        if record.levelno >= logging.ERROR and not text.startswith("engine failed"):
            error = record.exc_info[1] if record.exc_info else None
            self.violation(f"an error was logged: {text} {error!r}")

    def on_request_sent(self, observed: ObservedReceiver) -> None:
        if isinstance(observed.request, PrefillPhase):
            self.prefills.append(observed.request_id)
            self._note_part(observed.request_id)
            request = self.by_part[observed.request_id]
            request.failed_s.pop(observed.request_id, None)
            request.prefilled_s[observed.request_id] = self.loop.time()
            self.log(
                observed.process.name,
                f"prefill of {observed.request_id[-4:]} goes to {self.names[observed.instance_id]}",
            )
            return
        if not isinstance(observed.request, Generation):
            self.log(
                observed.process.name,
                f"sends to {self.names[observed.instance_id]} {observed.request_id.partition('-')[0]}",
            )
            return
        sent, part = self._request_of(observed), observed.request_id
        self.by_part[part] = sent
        sent.failed_s.pop(part, None)
        workers = sent.parts.setdefault(part, [])
        if (
            observed.instance_id in workers and not self.scenario.meets
        ):  # The request may only have waited for a prefill.
            left = invariants.untried_workers(self, sent, workers)
            if left:
                self.violation(
                    f"{sent.label} went to {self.names[observed.instance_id]} again, which had failed before, "
                    f"though {', '.join(left)} was left"
                )
        workers.append(observed.instance_id)
        sent.resumed += observed.request.tokens > 0
        self.log(observed.process.name, f"{sent.label} goes to {self.names[observed.instance_id]}")

    def _note_part(self, part: str) -> None:
        """Record the request that a prefill belongs to: its first attempt is sent by the request's own task."""
        if part not in self.by_part:
            scope = current_request.get()
            assert scope is not None, "a prefill was sent outside of its request"
            self.by_part[part] = next(sent for sent in self.requests if sent.plan.id == scope[0])

    def on_response_message(self, observed: ObservedReceiver) -> None:
        if isinstance(observed.request, Generation):
            self._request_of(observed).last_output_s = self.loop.time()

    def on_response_complete(self, observed: ObservedReceiver) -> None:
        if isinstance(observed.request, Generation):
            self._request_of(observed).whole.add(observed.request_id)

    def on_response_error(self, observed: ObservedReceiver, error: Exception) -> None:
        if isinstance(observed.request, PrefillPhase):
            if self._is_awaited(observed.request):
                self.by_part[observed.request_id].failed_s[observed.request_id] = self.loop.time()
            return
        if not isinstance(observed.request, Generation):
            return
        sent = self._request_of(observed)
        lacks_text = any(choice.finish_reason is None for choice in observed.request.choices)
        if sent.over_s is None and lacks_text:
            sent.failed_s[observed.request_id] = self.loop.time()
            if "unresponsive" in str(error) and not invariants.was_unresponsive(self, sent, observed.instance_id):
                self.violation(f"{sent.label} left {self.names[observed.instance_id]}, which is alive")
            self.log(observed.process.name, f"{sent.label} breaks: {error}")

    def _is_awaited(self, phase: PrefillPhase) -> bool:
        """Return whether the decode phase is sent only after this prefill has ended."""
        is_sequential = not self.scenario.meets or RouterMode(self.scenario.router_mode) in SEQUENTIAL_MODES
        return is_sequential and not phase.is_over

    @staticmethod
    def _request_of(observed: ObservedReceiver) -> SentRequest:
        answer = cast("BaseAnswer", cast("Generation", observed.request).answer)
        return cast("SimExchange", answer.exchange).sent

    def on_token_generated(self, part_id: str) -> None:
        """Check that an engine generates tokens only for requests that are in flight."""
        sent = self.by_part[part_id]
        over_s = sent.over_s
        now = self.loop.time()
        bound_s = self.cancel_bound_s + (LAST_WORDS_S if self.scenario.meets else 0.0)
        if over_s is not None and now - over_s > bound_s and not self.is_disturbed(over_s - 1.0, now):
            self.violation(f"{sent.label} was over at {over_s - STARTS_AT_S:.3f}; an engine still works on it")

    @property
    def cancel_bound_s(self) -> float:
        network_faults = self.scenario.network_faults
        return network_faults.notice_s + 2 * (network_faults.spike_s + 2 * network_faults.latency_s)

    def is_disturbed(self, begin: float, end: float, name: str | None = None) -> bool:
        return any(
            start <= end and (stop is None or stop >= begin)
            for who, start, stop in self.disturbances
            if name is None or who == name
        )

    def paused_s(self, name: str, begin: float, end: float) -> float:
        """Return the seconds of that interval in which a process was paused."""
        return sum(
            max(0.0, min(end, stop if stop is not None else end) - max(begin, start))
            for who, start, stop in self.disturbances
            if who == name
        )

    # Actions ------------------------------------------------------------------------------------------------------

    def run(self) -> "Simulation":
        """Run the simulation; afterwards `violations` lists the failures."""
        with determinism(self.loop, self.scenario.seed, self.on_log):
            try:
                self.loop.run_until_complete(self._main())
            except Stalled as stalled:
                self.violation(str(stalled))
            finally:
                self.loop.close()
        return self

    async def _main(self) -> None:
        scenario = self.scenario
        self.registry = Registry(self.network, Process(self.loop, "registry"), scenario.lease_s, scenario.resync_s)
        for _ in range(scenario.frontends):
            self.add_frontend()
        for model, count in scenario.workers.items():
            for _ in range(count):
                self.add_worker(model)
        for _ in range(scenario.prefills):
            self.add_worker("alpha", prefills=True)
        await asyncio.sleep(START_S)
        for _ in range(scenario.requests):
            self._plan_request()
        for fault in scenario.faults:
            self.driver.later(fault.at_s - START_S, self._fail, fault)
        await asyncio.sleep(HEAL_AT_S - START_S)
        self._heal()
        await asyncio.sleep(SETTLE_S)
        self._probe()
        await asyncio.sleep(PROBE_S)
        invariants.check_idle(self)
        for member in (*self.frontends, *self.workers):
            member.stop()
        await asyncio.sleep(STOP_S)
        invariants.check_end(self)
        self.seen = self._count()

    def add_frontend(self) -> FrontendMember:
        self._numbers["f"] += 1
        member = FrontendMember(self, f"frontend{self._numbers['f']}")
        self.frontends.append(member)
        return member

    def add_worker(self, model: str, *, has_other_card: bool = False, prefills: bool = False) -> WorkerMember:
        self._numbers["w"] += 1
        role = DisaggregationMode.AGGREGATED
        if self.scenario.prefills and model == "alpha":
            role = DisaggregationMode.PREFILL if prefills else DisaggregationMode.DECODE
        parser = OTHER_PARSER if has_other_card else None
        member = WorkerMember(self, f"worker{self._numbers['w']}", model, parser, role)
        self.workers.append(member)
        return member

    def _plan_request(self) -> None:
        rng = self.rng
        model = rng.choice(list(self.scenario.workers))
        is_chat = rng.random() < 0.3
        plan = PlannedRequest(
            id=self._request_id(),
            frontend=rng.randrange(self.scenario.frontends),
            model=model,
            at_s=self._arrival_s(),
            is_chat=is_chat,
            body=draw_body(rng, self.language, model, is_chat=is_chat),
            leaves_after_s=rng.choice((0.0, 0.01, 0.3, 3.0)) * rng.random()
            if rng.random() < self.scenario.leavers
            else None,
        )
        self.driver.later(plan.at_s, self.send, plan)

    def _arrival_s(self) -> float:
        """Draw a time after the start; half of the requests come shortly before a fault."""
        faults = self.scenario.faults
        if faults and self.rng.random() < 0.5:
            return max(0.0, self.rng.choice(faults).at_s - START_S - self.rng.uniform(0.0, 1.5))
        return self.rng.uniform(0.0, HEAL_AT_S - START_S - 1.0)

    def _request_id(self) -> str:
        self._numbers["r"] += 1
        return f"00000000-0000-4000-8000-{self._numbers['r']:012d}"

    def send(self, plan: PlannedRequest, frontend: FrontendMember | None = None) -> None:
        """Send a client's request, if a frontend is up."""
        up = [one for one in self.frontends if one.is_up]
        if frontend is None:
            if not up:
                return
            frontend = up[plan.frontend % len(up)]
        headers = [(b"x-dynamo-request-id", plan.id.encode())]
        wire = Wire(headers)
        exchange = SimExchange(wire, json.dumps(plan.body).encode())
        sent = SentRequest(plan, exchange, wire, frontend, self.loop.time())
        exchange.sent = sent
        wire.on_complete = lambda: self._ended(sent)
        self.requests.append(sent)
        kind = ("chat" if plan.is_chat else "completion") + (" stream" if plan.body.get("stream") else "")
        shown = {key: plan.body[key] for key in ("max_tokens", "n", "min_tokens", "stop") if key in plan.body}
        self.log("client", f"{sent.label}: {kind} of {plan.model} to {frontend.name} {shown}")
        frontend.process.soon(frontend.take, sent)
        if plan.leaves_after_s is not None:
            self.driver.later(plan.leaves_after_s, self._leave, sent)

    def _leave(self, sent: SentRequest) -> None:
        if sent.over_s is None:
            sent.left_s = self.loop.time()
            self.log("client", f"{sent.label} is left")
            sent.frontend.process.soon(sent.exchange.left)

    def _ended(self, sent: SentRequest) -> None:
        sent.ended_s = self.loop.time()
        self.log(sent.frontend.name, f"{sent.label} ends: {invariants.outcome(sent)}")

    # Faults -------------------------------------------------------------------------------------------------------

    def _fail(self, fault: Fault) -> None:
        workers = [one for one in self.workers if one.is_alive]
        frontends = [one for one in self.frontends if one.is_up]
        busy = [one for one in workers if one.engine.runs]
        aimed = busy if busy and fault.other < 0.7 else workers
        worker = aimed[int(fault.one * len(aimed))] if aimed else None
        frontend = frontends[int(fault.other * len(frontends))] if frontends else None
        if self._apply_fault(fault, worker, frontend):
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1

    def _apply_fault(self, fault: Fault, worker: WorkerMember | None, frontend: FrontendMember | None) -> bool:
        if fault.kind.startswith("start worker"):
            models = list(self.scenario.workers)
            has_other_card = fault.kind != "start worker"
            added = self.add_worker(models[int(fault.one * len(models))], has_other_card=has_other_card)
            self.log("fault", f"{fault.kind}: {added.name}")
            return True
        if "worker" in fault.kind or "engine" in fault.kind:
            if worker is None:
                return False
            return self._apply_worker_fault(fault, worker, frontend)
        if frontend is None:
            return False
        return self._apply_frontend_fault(fault, frontend)

    def _apply_worker_fault(self, fault: Fault, worker: WorkerMember, frontend: FrontendMember | None) -> bool:
        kind = fault.kind
        self.log("fault", f"{kind}: {worker.name} {fault.lasts_s:.2f} s")
        if kind == "kill worker":
            worker.kill()
        elif kind == "lose machine of worker":
            worker.kill(response=False)
            now, scenario = self.loop.time(), self.scenario
            self.disturbances.append([worker.name, now, now + scenario.lease_s + 2 * scenario.resync_s + LOST_S])
        elif kind == "stop worker":
            worker.stop()
        elif kind == "cut worker from frontend":
            if frontend is None:
                return False
            self._cut(worker.process, frontend.process, fault.lasts_s)
        elif kind == "cut worker from registry":
            self._cut(worker.process, self.registry.process, fault.lasts_s)
        elif kind == "pause worker":
            self._pause(worker, fault.lasts_s)
        elif kind == "stick engine":
            worker.engine.is_stuck = True
            worker.process.later(fault.lasts_s, worker.engine.unblock)
        elif kind == "break engine":
            worker.process.soon(worker.engine.die)
        return True

    def _apply_frontend_fault(self, fault: Fault, frontend: FrontendMember) -> bool:
        kind = fault.kind
        self.log("fault", f"{kind}: {frontend.name} {fault.lasts_s:.2f} s")
        is_only = len([one for one in self.frontends if one.is_up]) == 1
        if kind == "cut frontend from registry":
            self._cut(frontend.process, self.registry.process, fault.lasts_s)
        elif kind == "pause frontend":
            self._pause(frontend, fault.lasts_s)
        elif kind == "break links":
            links = [link for link in self.network.links if frontend.process in link.ends]
            for link in links:
                link.sever(0.0, self.network.latency())
            now = self.loop.time()
            self.disturbances.append([f"{frontend.name}/links", now, now])
            return bool(links)
        elif is_only:
            return False
        elif kind == "kill frontend":
            frontend.kill()
            for sent in self.requests:
                if sent.frontend is frontend and sent.over_s is None:
                    sent.left_s = self.loop.time()
        elif kind == "stop frontend":
            frontend.stop()
        return True

    def _cut(self, one: Process, other: Process, lasts_s: float) -> None:
        self.network.cut(one, other)
        disturbance = [f"{one.name}/{other.name}", self.loop.time(), None]
        self.disturbances.append(disturbance)

        def reconnect() -> None:
            if disturbance[2] is None:
                self.network.reconnect(one, other)
                disturbance[2] = self.loop.time() + self.scenario.network_faults.notice_s

        self.driver.later(lasts_s, reconnect)

    def _pause(self, member: Member, lasts_s: float) -> None:
        member.process.is_paused = True
        disturbance = [member.name, self.loop.time(), None]
        self.disturbances.append(disturbance)

        def resume() -> None:
            if disturbance[2] is None:
                member.process.is_paused = False
                disturbance[2] = self.loop.time()

        self.driver.later(lasts_s, resume)

    def _heal(self) -> None:
        """End all faults, and start a worker for each model without one."""
        self.log("fault", "all faults end")
        self.is_healed = True
        self.network.is_calm = True
        self.network.reconnect_all()
        now = self.loop.time()
        for disturbance in self.disturbances:
            if disturbance[2] is None:
                disturbance[2] = now + self.scenario.network_faults.notice_s
        for member in (*self.frontends, *self.workers):
            member.process.is_paused = False
        for worker in self.workers:
            if worker.is_alive:
                worker.process.soon(worker.engine.reconnect)
        self._replace()
        self.driver.later(1.0, self._replace)  # An engine that failed while its process was paused.

    def _replace(self) -> None:
        """Start a worker for each model without one."""
        for model in self.scenario.workers:
            if not self._has(model):
                self.add_worker(model)
        if self.scenario.prefills and not self._has("alpha prefill"):
            self.add_worker("alpha", prefills=True)

    def _has(self, model: str) -> bool:
        return any(one.is_alive and not one.is_stopping and one.model == model for one in self.workers)

    def _probe(self) -> None:
        """Send a plain request for every model to every frontend, more than once; each must succeed."""
        number = 0
        for frontend in self.frontends:
            for model in [model for model in self.scenario.workers for _ in range(3)]:
                prompt = [self.rng.randrange(256, 1500) for _ in range(4)]
                body = {"model": model, "prompt": prompt, "max_tokens": 4, "stream": True}
                plan = PlannedRequest(self._request_id(), 0, model, 0.0, False, body, None, is_probe=True)
                if frontend.is_up:
                    self.driver.later(number * PROBE_GAP_S, self.send, plan, frontend)
                    number += 1


_languages: list[Language] = []


def language() -> Language:
    """Return the demo model's tokens."""
    if not _languages:
        card = demo_card()
        preprocessor = load_once(card, AssetCache(), tuple(BACKENDS))
        table: TokenTable = preprocessor.tokenizer.table(skip_special_tokens=True)
        _languages.append(Language(table, preprocessor.defaults.eos_token_ids[0]))
    return _languages[0]


def demo_card() -> Any:
    """Return the card that every worker of the first model publishes."""
    from tests.simulation.engine import BLOCK_TOKENS, BLOCKS, MODEL_DIR

    from dynamo.backend.engine import EngineConfig

    config = EngineConfig(
        model_path=MODEL_DIR,
        served_model_name="alpha",
        context_length=CONTEXT_LENGTH,
        kv_cache_block_size=BLOCK_TOKENS,
        total_kv_blocks=BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=CONTEXT_LENGTH,
    )
    return make_card_once(WorkerOptions(namespace="sim", endpoint="sim.alpha.generate"), config)
