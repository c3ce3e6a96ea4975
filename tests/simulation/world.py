"""World: one seeded run: production's frontends and workers on a network that fails them, and clients that watch.

draw a scenario ─▶ start ─▶ requests and faults ─▶ mend everything ─▶ settle ─▶ probe ─▶ rest ─▶ shut down ─▶ judge
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
from tests.simulation.clients import Plan, Sent, SimExchange, Wire, draw_body
from tests.simulation.determinism import determinism, load_once, make_card_once
from tests.simulation.engine import CONTEXT_LENGTH, Language, ScriptedEngine
from tests.simulation.ether import Ether, SimBus
from tests.simulation.loop import STARTS_AT_S, Process, SimLoop, Stalled
from tests.simulation.network import Network
from tests.simulation.registry import Registry, SimDiscovery
from tests.simulation.request_plane import SimPlane, SocketPlane, Watched, Witness
from tests.simulation.scenario import HEAL_AT_S, Fault, Scenario, draw_character
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

START_S = 2.0  # Everyone has loaded and heard of each other by then.
SETTLE_S = 24.0  # The longest silence, lease, notice and inhibition, one after another.
PROBE_GAP_S = 1.5  # The slowest engine with one slot has answered one before the next comes.
PROBE_S = 35.0
STOP_S = 40.0
GRACE_S = 1.0
DRAIN_S = 3.0
OTHER_PARSER = "hermes"  # It makes a card another one, and nothing else here.
LOST_S = 10.0  # Beyond lease and news: connections that are tried and hang.
BATCHED = 0.7  # So many members speak our frames; the others speak as released peers do.


class Member:
    """One production process: its runtime on the simulated planes."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.process = Process(world.loop, name)
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
        """Alive, ready and meaning to stay."""
        return self.is_alive and self.opened.is_set() and not self.is_stopping

    def _open(self) -> DistributedRuntime:
        world, process = self.world, self.process
        self.discovery = SimDiscovery(world.registry, process)

        def plane(dispatcher: Any, registry: Any) -> SimPlane | SocketPlane:
            witness = Witness(process, self.discovery, world)
            if world.scenario.has_sockets:
                self.plane = SocketPlane(dispatcher, witness, registry, batched=world.rng.random() < BATCHED)
            else:
                self.plane = SimPlane(dispatcher, world.network, witness)
            return self.plane

        bus = SimBus(world.ether, process)
        return DistributedRuntime(None, self.discovery, plane, event_plane=lambda _: MemoryEventPlane(bus))

    async def _live(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """SIGTERM."""
        if self.is_alive and not self.is_stopping:
            self.is_stopping = True
            self.process.start(self._stop(), "stop")

    async def _stop(self) -> None:
        await self.opened.wait()
        await self._end()
        left = [task.get_name() for task in self.process.tasks if task is not asyncio.current_task()]
        if left:
            self.world.violation(f"{self.name} ended and left {', '.join(left)}")
        self.world.log(self.name, "exits")
        self.kill()

    def kill(self, *, told: bool = True) -> None:
        """SIGKILL, or, if the kernel sends no resets, the loss of the machine."""
        if self.is_alive:
            self.process.kill()
            self.world.network.died(self.process, told=told)
            self.world.deaths[self.runtime.instance_id] = self.world.loop.time()


class FrontendMember(Member):
    """What `dynamo.frontend.main.serve` does, without the socket."""

    async def _live(self) -> None:
        scenario = self.world.scenario
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
        """As `HttpService` does."""
        self.pipeline.abandon(self.world.scenario.silence_s)
        self._sweeper = self.world.loop.call_later(SWEEP_S, self._sweep)

    async def _end(self) -> None:
        await self.pipeline.drain(5.0)
        self._sweeper.cancel()
        await self.models.close()
        await self.runtime.shutdown()

    def take(self, sent: Sent) -> None:
        """A request has arrived whole."""
        handle = self.pipeline.handle_chat if sent.plan.is_chat else self.pipeline.handle_completion
        handle(sent.exchange)


class WorkerMember(Member):
    """What `dynamo.backend.worker.WorkerProcess` does, with an engine of ours."""

    def __init__(
        self, world: "World", name: str, model: str, tool_parser: str | None, role: DisaggregationMode
    ) -> None:
        self.model = f"{model} prefill" if role is DisaggregationMode.PREFILL else model
        self._served = model
        self._role = role
        self._tool_parser = tool_parser
        character = draw_character(world.rng, is_calm=world.scenario.is_calm)
        rng = random.Random(f"engine {world.scenario.seed} {name}")
        self.engine = ScriptedEngine(
            world.language,
            model,
            character,
            rng,
            world.worked,
            role=role,
            meets=world.scenario.meets and role is DisaggregationMode.PREFILL,
            prefills_locally=world.scenario.prefills_locally and role is DisaggregationMode.DECODE,
        )
        self.engine.is_mended = world.is_mended
        self.served_s = math.inf
        """Time since which it serves."""
        super().__init__(world, name)

    async def _live(self) -> None:
        self.runtime = runtime = self._open()
        place = f"{self._served}_prefill" if self._role is DisaggregationMode.PREFILL else self._served
        options = DisaggregatedOptions(
            disaggregation_mode=self._role.value,
            namespace="sim",
            endpoint=f"sim.{place}.generate",
            engine_request_limit=self.world.scenario.slots,
            tool_call_parser=self._tool_parser,
        )
        self.worker = EngineWorker(options, self.engine, runtime, on_failure=lambda _: self.stop())
        self.world.names[runtime.instance_id] = self.name
        await runtime.connect()
        await self.worker.start()
        self.opened.set()
        self.served_s = self.world.loop.time()
        self.world.log(self.name, f"serves {self.model} as {runtime.instance_id:x}")

    async def _end(self) -> None:
        await self.worker.stop(GRACE_S, DRAIN_S)


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.scenario = scenario = Scenario.draw(seed)
        self.rng = random.Random(f"world {seed}")
        self.loop = SimLoop(random.Random(f"order {seed}"))
        self.violations: list[str] = []
        self.events: list[str] = []
        self.language = language()
        self.world_process = Process(self.loop, "network")
        rng = random.Random(f"network {seed}")
        self.network = Network(self.loop, rng, scenario.weather, self.world_process, is_calm=scenario.is_calm)
        self.ether = Ether(self.network)
        self.loop.sockets = Sockets(self.network)
        self.frontends: list[FrontendMember] = []
        self.workers: list[WorkerMember] = []
        self.requests: list[Sent] = []
        self.names: dict[int, str] = {}
        """Instance id to the name of its process."""
        self.deaths: dict[int, float] = {}
        """Instance id to when its process ended."""
        self.by_part: dict[str, Sent] = {}
        """Request id as the workers see it to the request."""
        self.prefills: list[str] = []
        """Request ids of prefills, as often as they were begun."""
        self.disturbances: list[list[Any]] = []
        """Name of a process or of a pair, begin, and end or None: when messages may be held up."""
        self.counts: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        """What happened how often, after the run."""
        self.is_mended = False
        self._numbers = {"w": 0, "f": 0, "r": 0}

    # What is seen --------------------------------------------------------------------------------------------------

    def log(self, who: str, what: str) -> None:
        if self.loop.is_closed():
            return  # What happens while the dead are buried.
        self.events.append(f"{self.loop.time() - STARTS_AT_S:10.4f}  {who:<9} {what}")

    def violation(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)
            self.log("!!!", what)

    def digest(self) -> str:
        """Equal for runs in which the same things happened at the same times."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()

    def _count(self) -> Counter[str]:
        """What happened how often."""
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

    def hear_log(self, record: logging.LogRecord) -> None:
        """A warning of production's; an error that is none of the scripted ones is our bug."""
        if self.loop.is_closed():
            return
        text = record.getMessage()
        self.log("log", f"{record.levelname.lower()} {record.name.removeprefix('dynamo.')}: {text}")
        if record.levelno >= logging.ERROR and not text.startswith("engine failed"):
            error = record.exc_info[1] if record.exc_info else None
            self.violation(f"an error was logged: {text} {error!r}")

    def was_sent(self, heard: Watched) -> None:
        if isinstance(heard.receiver, PrefillPhase):
            self.prefills.append(heard.request_id)
            self._note_part(heard.request_id)
            request = self.by_part[heard.request_id]
            request.broke_s.pop(heard.request_id, None)
            request.prefilled_s[heard.request_id] = self.loop.time()
            self.log(heard.process.name, f"prefill of {heard.request_id[-4:]} goes to {self.names[heard.instance_id]}")
            return
        if not isinstance(heard.receiver, Generation):
            self.log(heard.process.name, f"asks {self.names[heard.instance_id]} {heard.request_id.partition('-')[0]}")
            return
        sent, part = self._request_of(heard), heard.request_id
        self.by_part[part] = sent
        sent.broke_s.pop(part, None)
        workers = sent.parts.setdefault(part, [])
        if heard.instance_id in workers and not self.scenario.meets:  # It may only have waited for a prefill.
            left = invariants.untried(self, sent, workers)
            if left:
                self.violation(
                    f"{sent.label} went to {self.names[heard.instance_id]} again, which had failed it, "
                    f"though {', '.join(left)} was left"
                )
        workers.append(heard.instance_id)
        sent.resumed += heard.receiver.tokens > 0
        self.log(heard.process.name, f"{sent.label} goes to {self.names[heard.instance_id]}")

    def _note_part(self, part: str) -> None:
        """Note whose request a prefill is part of: its first attempt is sent by the request's own task."""
        if part not in self.by_part:
            scope = current_request.get()
            assert scope is not None, "a prefill was sent outside of its request"
            self.by_part[part] = next(sent for sent in self.requests if sent.plan.id == scope[0])

    def was_heard(self, heard: Watched) -> None:
        if isinstance(heard.receiver, Generation):
            self._request_of(heard).heard_s = self.loop.time()

    def was_whole(self, heard: Watched) -> None:
        if isinstance(heard.receiver, Generation):
            self._request_of(heard).whole.add(heard.request_id)

    def broke(self, heard: Watched, error: Exception) -> None:
        if isinstance(heard.receiver, PrefillPhase):
            if self._is_awaited(heard.receiver):
                self.by_part[heard.request_id].broke_s[heard.request_id] = self.loop.time()
            return
        if not isinstance(heard.receiver, Generation):
            return
        sent = self._request_of(heard)
        lacks_text = any(choice.finish_reason is None for choice in heard.receiver.choices)
        if sent.over_s is None and lacks_text:
            sent.broke_s[heard.request_id] = self.loop.time()
            if "unresponsive" in str(error) and not invariants.stood_still(self, sent, heard.instance_id):
                self.violation(f"{sent.label} left {self.names[heard.instance_id]}, which lives")
            self.log(heard.process.name, f"{sent.label} breaks: {error}")

    def _is_awaited(self, phase: PrefillPhase) -> bool:
        """Return whether the decode phase is sent only after this prefill has ended."""
        is_sequential = not self.scenario.meets or RouterMode(self.scenario.router_mode) in SEQUENTIAL_MODES
        return is_sequential and not phase.is_over

    @staticmethod
    def _request_of(heard: Watched) -> Sent:
        answer = cast("BaseAnswer", cast("Generation", heard.receiver).answer)
        return cast("SimExchange", answer.exchange).sent

    def worked(self, part_id: str) -> None:
        """An engine made a token; it must not be for a request that is over."""
        sent = self.by_part[part_id]
        over_s = sent.over_s
        now = self.loop.time()
        bound_s = self.cancel_bound_s + (LAST_WORDS_S if self.scenario.meets else 0.0)
        if over_s is not None and now - over_s > bound_s and not self.is_disturbed(over_s - 1.0, now):
            self.violation(f"{sent.label} was over at {over_s - STARTS_AT_S:.3f}; an engine still works on it")

    @property
    def cancel_bound_s(self) -> float:
        weather = self.scenario.weather
        return weather.notice_s + 2 * (weather.spike_s + 2 * weather.latency_s)

    def is_disturbed(self, begin: float, end: float, name: str | None = None) -> bool:
        return any(
            start <= end and (stop is None or stop >= begin)
            for who, start, stop in self.disturbances
            if name is None or who == name
        )

    def paused_s(self, name: str, begin: float, end: float) -> float:
        """For how long of that time a process was paused."""
        return sum(
            max(0.0, min(end, stop if stop is not None else end) - max(begin, start))
            for who, start, stop in self.disturbances
            if who == name
        )

    # What happens --------------------------------------------------------------------------------------------------

    def run(self) -> "World":
        """The whole run; afterwards `violations` lists the failures."""
        with determinism(self.loop, self.scenario.seed, self.hear_log):
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
            self.world_process.later(fault.at_s - START_S, self._fail, fault)
        await asyncio.sleep(HEAL_AT_S - START_S)
        self._heal()
        await asyncio.sleep(SETTLE_S)
        self._probe()
        await asyncio.sleep(PROBE_S)
        invariants.judge_rest(self)
        for member in (*self.frontends, *self.workers):
            member.stop()
        await asyncio.sleep(STOP_S)
        invariants.judge_end(self)
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
        plan = Plan(
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
        self.world_process.later(plan.at_s, self.send, plan)

    def _arrival_s(self) -> float:
        """Some time after the start; half of the requests come shortly before something goes wrong."""
        faults = self.scenario.faults
        if faults and self.rng.random() < 0.5:
            return max(0.0, self.rng.choice(faults).at_s - START_S - self.rng.uniform(0.0, 1.5))
        return self.rng.uniform(0.0, HEAL_AT_S - START_S - 1.0)

    def _request_id(self) -> str:
        self._numbers["r"] += 1
        return f"00000000-0000-4000-8000-{self._numbers['r']:012d}"

    def send(self, plan: Plan, frontend: FrontendMember | None = None) -> None:
        """A client sends its request, if it finds a frontend."""
        up = [one for one in self.frontends if one.is_up]
        if frontend is None:
            if not up:
                return
            frontend = up[plan.frontend % len(up)]
        headers = [(b"x-dynamo-request-id", plan.id.encode())]
        wire = Wire(headers)
        exchange = SimExchange(wire, json.dumps(plan.body).encode())
        sent = Sent(plan, exchange, wire, frontend, self.loop.time())
        exchange.sent = sent
        wire.on_complete = lambda: self._ended(sent)
        self.requests.append(sent)
        kind = ("chat" if plan.is_chat else "completion") + (" stream" if plan.body.get("stream") else "")
        shown = {key: plan.body[key] for key in ("max_tokens", "n", "min_tokens", "stop") if key in plan.body}
        self.log("client", f"{sent.label}: {kind} of {plan.model} to {frontend.name} {shown}")
        frontend.process.soon(frontend.take, sent)
        if plan.leaves_after_s is not None:
            self.world_process.later(plan.leaves_after_s, self._leave, sent)

    def _leave(self, sent: Sent) -> None:
        if sent.over_s is None:
            sent.left_s = self.loop.time()
            self.log("client", f"{sent.label} is left")
            sent.frontend.process.soon(sent.exchange.left)

    def _ended(self, sent: Sent) -> None:
        sent.ended_s = self.loop.time()
        self.log(sent.frontend.name, f"{sent.label} ends: {invariants.outcome(sent)}")

    # What goes wrong -----------------------------------------------------------------------------------------------

    def _fail(self, fault: Fault) -> None:
        workers = [one for one in self.workers if one.is_alive]
        frontends = [one for one in self.frontends if one.is_up]
        busy = [one for one in workers if one.engine.runs]
        aimed = busy if busy and fault.other < 0.7 else workers
        worker = aimed[int(fault.one * len(aimed))] if aimed else None
        frontend = frontends[int(fault.other * len(frontends))] if frontends else None
        if self._do(fault, worker, frontend):
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1

    def _do(self, fault: Fault, worker: WorkerMember | None, frontend: FrontendMember | None) -> bool:
        if fault.kind.startswith("start worker"):
            models = list(self.scenario.workers)
            has_other_card = fault.kind != "start worker"
            added = self.add_worker(models[int(fault.one * len(models))], has_other_card=has_other_card)
            self.log("fault", f"{fault.kind}: {added.name}")
            return True
        if "worker" in fault.kind or "engine" in fault.kind:
            if worker is None:
                return False
            return self._do_worker(fault, worker, frontend)
        if frontend is None:
            return False
        return self._do_frontend(fault, frontend)

    def _do_worker(self, fault: Fault, worker: WorkerMember, frontend: FrontendMember | None) -> bool:
        kind = fault.kind
        self.log("fault", f"{kind}: {worker.name} {fault.lasts_s:.2f} s")
        if kind == "kill worker":
            worker.kill()
        elif kind == "lose machine of worker":
            worker.kill(told=False)
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
            worker.process.later(fault.lasts_s, worker.engine.unstick)
        elif kind == "break engine":
            worker.process.soon(worker.engine.die)
        return True

    def _do_frontend(self, fault: Fault, frontend: FrontendMember) -> bool:
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
        trouble = [f"{one.name}/{other.name}", self.loop.time(), None]
        self.disturbances.append(trouble)

        def mend() -> None:
            if trouble[2] is None:
                self.network.mend(one, other)
                trouble[2] = self.loop.time() + self.scenario.weather.notice_s

        self.world_process.later(lasts_s, mend)

    def _pause(self, member: Member, lasts_s: float) -> None:
        member.process.is_paused = True
        trouble = [member.name, self.loop.time(), None]
        self.disturbances.append(trouble)

        def go_on() -> None:
            if trouble[2] is None:
                member.process.is_paused = False
                trouble[2] = self.loop.time()

        self.world_process.later(lasts_s, go_on)

    def _heal(self) -> None:
        """Everything is mended, and every model has a worker."""
        self.log("fault", "everything is mended")
        self.is_mended = True
        self.network.is_calm = True
        self.network.mend_all()
        now = self.loop.time()
        for trouble in self.disturbances:
            if trouble[2] is None:
                trouble[2] = now + self.scenario.weather.notice_s
        for member in (*self.frontends, *self.workers):
            member.process.is_paused = False
        for worker in self.workers:
            if worker.is_alive:
                worker.process.soon(worker.engine.mend)
        self._replace()
        self.world_process.later(1.0, self._replace)  # An engine that broke while its process was paused.

    def _replace(self) -> None:
        """Every model has a worker."""
        for model in self.scenario.workers:
            if not self._has(model):
                self.add_worker(model)
        if self.scenario.prefills and not self._has("alpha prefill"):
            self.add_worker("alpha", prefills=True)

    def _has(self, model: str) -> bool:
        return any(one.is_alive and not one.is_stopping and one.model == model for one in self.workers)

    def _probe(self) -> None:
        """A plain request for every model to every frontend, more than once: it must succeed."""
        number = 0
        for frontend in self.frontends:
            for model in [model for model in self.scenario.workers for _ in range(3)]:
                prompt = [self.rng.randrange(256, 1500) for _ in range(4)]
                body = {"model": model, "prompt": prompt, "max_tokens": 4, "stream": True}
                plan = Plan(self._request_id(), 0, model, 0.0, False, body, None, is_probe=True)
                if frontend.is_up:
                    self.world_process.later(number * PROBE_GAP_S, self.send, plan, frontend)
                    number += 1


_languages: list[Language] = []


def language() -> Language:
    """The demo model's tokens."""
    if not _languages:
        card = demo_card()
        preprocessor = load_once(card, AssetCache(), tuple(BACKENDS))
        table: TokenTable = preprocessor.tokenizer.table(skip_special_tokens=True)
        _languages.append(Language(table, preprocessor.defaults.eos_token_ids[0]))
    return _languages[0]


def demo_card() -> Any:
    """The card that every worker of the first model publishes."""
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
