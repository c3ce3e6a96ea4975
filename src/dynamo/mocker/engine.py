"""MockerEngine: run the simulation in real time.

    submit ──▶ Simulation ──step()──▶ wait until the step's end ──▶ tokens to the replies, events to the host

Steps end at absolute times, so a late wake-up is compensated by the next step. Where steps take no time, the event loop
still gets turns so that output is sent: after every first token, otherwise after `TURN_TOKENS` tokens.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from dynamo.backend.disagg import DisaggregationMode, bootstrap_of, prefill_output, prefill_request, prefill_source_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import DynamoException, EngineShutdown
from dynamo.core.tasks import TaskOwner
from dynamo.mocker.config import MockerConfig, demo_model
from dynamo.mocker.convert import ModelFacts, SimulationInput, last_output, read_request, replay_id, usage_of
from dynamo.mocker.events import EngineMetrics, SimulatedStepReporter
from dynamo.mocker.handoff import Handoff, HandoffServer
from dynamo.mocker.native_events import NativeEvents
from dynamo.mocker.scripts import ScriptedReply, read_answers
from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.engines import simulate
from dynamo.mocker.simulation.sequence import SequenceState, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.model_card.hub import resolve_model
from dynamo.protocols.engine import BootstrapInfo, EngineOutput, PreprocessedRequest
from dynamo.protocols.native import SGLANG_CAPABILITY
from dynamo.runtime.request_plane.base import Reply

logger = logging.getLogger(__name__)

LATE_MAX_S = 0.05  # A longer stall is not compensated: a real engine would not run faster after it.

TURN_TOKENS = 256  # Tokens written between two turns of the event loop where steps take no time: about 0.1 ms.


class RankRunner:
    """A data-parallel rank: a simulation and the task that steps it."""

    def __init__(self, simulation: Batching[Reply], reporter: SimulatedStepReporter, clock: Clock) -> None:
        self.simulation = simulation
        self.idle = asyncio.Event()
        self._reporter = reporter
        self._clock = clock
        self._wake = asyncio.Event()
        self._last_end = 0.0
        self._unsent = 0
        self._emit: Callable[[SimulatedSequence[Reply]], None] = emit_last
        self._looking: dict[SimulatedSequence[Reply], asyncio.Event] = {}
        """Events to set when a sequence holds its blocks."""

    @property
    def requests(self) -> int:
        """Return the number of waiting and running requests."""
        simulation = self.simulation
        running = len(simulation.decoding) + (simulation.partial is not None)
        return running + len(simulation.waiting) + len(simulation.loading) + len(simulation.loaded)

    def submit(
        self, inputs: SimulationInput, reply: Reply, *, is_remote: bool = False, stays: bool = False
    ) -> SimulatedSequence[Reply]:
        """Queue a request; it is scheduled from the next step on."""
        self.wake()
        now_ms = self._clock.now() * 1000
        sequence = self.simulation.submit(
            reply, inputs.prompt, inputs.max_tokens, now_ms, inputs.hash_seed, is_remote=is_remote, stays=stays
        )
        sequence.script = inputs.script
        return sequence

    async def wait_for_blocks(self, sequence: SimulatedSequence[Reply]) -> None:
        """Wait until a sequence holds its blocks or was removed."""
        there = self._looking[sequence] = asyncio.Event()
        try:
            await there.wait()
        finally:
            del self._looking[sequence]

    def _notify_reserved(self) -> None:
        for sequence, there in self._looking.items():
            if sequence.state is not SequenceState.WAITING:
                there.set()

    def let_go(self, sequence: SimulatedSequence[Reply]) -> None:
        """Release the blocks of a prompt that was computed for another worker."""
        self.simulation.let_go(sequence)
        if self.idle.is_set():
            self._reporter.rest()  # Otherwise the current step is reported first.

    def wake(self) -> None:
        """Resume stepping because there may be new work."""
        self.idle.clear()
        self._wake.set()

    async def run(
        self, done: Callable[[Reply], None], emit: Callable[[SimulatedSequence[Reply]], None] | None = None
    ) -> None:
        """Step while there is work, otherwise wait for work; call `done` for every completed answer.

        `emit` emits the last token of an answer; None uses `emit_last`.
        """
        self._emit = emit or emit_last
        end = 0.0
        while True:
            while self.simulation.is_idle:
                self._reporter.rest()
                await self._sleep_until_work()
                end = self._last_end = self._clock.now()
            result = self.simulation.step(end * 1000)
            if self._looking:
                self._notify_reserved()
            end += result.duration_ms / 1000
            end = max(end, self._clock.now() - LATE_MAX_S)
            left = end - self._clock.now()
            if left > 0:
                await self._clock.sleep(left)
            self._deliver(result, done)
            if left <= 0:
                await self._give_turn(result)

    async def _give_turn(self, result: StepResult[Reply]) -> None:
        self._unsent += len(result.tokens)
        if result.prefilled or self._unsent >= TURN_TOKENS:
            self._unsent = 0
            await self._clock.sleep(0)

    async def _sleep_until_work(self) -> None:
        self.idle.set()
        self._wake.clear()
        await self._wake.wait()

    def _deliver(self, result: StepResult[Reply], done: Callable[[Reply], None]) -> None:
        for sequence, token in zip(result.sequences, result.tokens, strict=True):
            sequence.owner.token(token)
        for sequence in result.finished:
            self._emit(sequence)
            done(sequence.owner)
        now, before = self._clock.now(), self._last_end
        self._last_end = now
        self._reporter.report(result, now * 1000, now - before)


def emit_last(sequence: SimulatedSequence[Reply]) -> None:
    """Emit the last token of an answer and finish the reply."""
    sequence.owner.item(last_output(sequence))
    sequence.owner.finish()


@dataclass(slots=True, eq=False)
class Running:
    """A request whose answer is not complete."""

    rank: RankRunner
    sequence: SimulatedSequence[Reply] | None = None
    """None until the part that this worker computes has been submitted."""
    session_number: int | None = None
    """Bootstrap room number at which the decode worker meets this prefill."""
    meeting: asyncio.Task[None] | None = None


class MockerEngine:
    """An `LLMEngine` that generates random tokens at the pace of a GPU."""

    def __init__(self, config: MockerConfig, index: int = 0, clock: Clock | None = None) -> None:
        self._config = config
        self._index = index
        """Index of this engine's worker in the process."""
        self._clock = clock or SystemClock()
        self._facts: ModelFacts | None = None
        self._thoughts = config.thoughts()
        self._answers: dict[str, list[int]] = {}
        self._ranks: list[RankRunner] = []
        self._running: dict[Reply, Running] = {}
        self._handoffs: HandoffServer | None = None
        self._native_events: list[NativeEvents] = []
        self._tasks: TaskOwner | None = None

    async def start(self, host: EngineHost) -> EngineConfig:
        config = self._config
        path = await asyncio.to_thread(resolve_model, config.model_path or demo_model())
        facts = self._facts = await asyncio.to_thread(ModelFacts.read, path, config)
        source = await asyncio.to_thread(TokenSource, facts.answer_vocab_size, facts.eos_token_ids)
        await asyncio.to_thread(getattr, source, "ids")  # Made before the first request.
        timing = await asyncio.to_thread(config.timing)
        if config.response_replay_trace_path is not None:
            self._answers = await asyncio.to_thread(read_answers, config.response_replay_trace_path)
        await self._clock.sleep(config.startup_time or 0.0)
        self._tasks = TaskOwner("mocker", on_crash=lambda _name, error: host.fail(error))
        limits = config.limits(facts.kv_bytes_per_token)
        is_traced = setting("DYN_MOCKER_KV_CACHE_TRACE", False, read_bool)
        for rank_index in range(config.data_parallel_size):
            simulation = simulate(limits, timing, source, rank_index)
            engine = str(self._index * config.data_parallel_size + rank_index)
            reporter = SimulatedStepReporter(
                host,
                EngineMetrics(host.metrics, engine, facts.name),
                simulation,
                publishes_cache=config.role.publishes_cache and config.enable_prefix_caching,
                native_events=self._open_native_events(rank_index),
                is_traced=is_traced,
            )
            rank = RankRunner(simulation, reporter, self._clock)
            rank.idle.set()
            self._ranks.append(rank)
            self._tasks.start(rank.run(self._done, self._emit_last), f"rank-{rank_index}")
        bootstrap_port = await self._open_handoffs()
        routing = config.routing()
        return EngineConfig(
            model_path=path,
            served_model_name=facts.name,
            context_length=config.max_model_len or 0,  # As upstream's, because a pool's cards must agree.
            kv_cache_block_size=config.block_tokens,
            total_kv_blocks=config.num_gpu_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            data_parallel_size=config.data_parallel_size,
            runtime_data={"output_replay_consumer": True}
            | ({SGLANG_CAPABILITY: True} if config.sglang_generate else {}),
            bootstrap_host=None if bootstrap_port is None else own_address(),
            bootstrap_port=bootstrap_port,
            publishes_kv_events=config.enable_prefix_caching,
            router_config=None if routing is None else routing.on_card(),
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if self._facts is None or not self._ranks:
            raise EngineShutdown("the engine is not running")
        role = self._config.role
        prefill = prefill_source_of(request) if role is DisaggregationMode.DECODE else None
        inputs = read_request(
            prefill_request(request) if role is DisaggregationMode.PREFILL else request, self._facts, len(self._ranks)
        )
        inputs = self._scripted(request, inputs)
        owner: Reply = reply if inputs.script is None else ScriptedReply(reply, inputs.script)
        rank = self._least_busy() if inputs.dp_rank is None else self._ranks[inputs.dp_rank]
        stays = role is DisaggregationMode.PREFILL
        running = self._running[reply] = Running(rank)
        meeting, handoffs = bootstrap_of(request), self._handoffs
        if stays and meeting is not None and handoffs is not None:
            running.session_number = meeting.bootstrap_room
            if handoffs.decode_is_first:
                running.meeting = self._start(self._compute_when_reserved(running, inputs, owner), "room")
                return
        if isinstance(prefill, BootstrapInfo):
            running.meeting = self._start(self._take_over(prefill, running, inputs, owner), "handoff")
            return
        running.sequence = rank.submit(inputs, owner, is_remote=prefill is not None, stays=stays)
        if prefill is not None:
            rank.simulation.arrive(running.sequence, 0.0)

    def cancel(self, reply: Reply) -> None:
        running = self._running.pop(reply, None)
        if running is None:
            return
        if running.meeting is not None:
            running.meeting.cancel()
        if running.sequence is not None:
            running.rank.simulation.cancel(running.sequence)
            running.rank.simulation.let_go(running.sequence)  # The last step of a prefill is in progress.
            running.rank.wake()
        if running.session_number is not None and self._handoffs is not None:
            self._handoffs.lost(running.session_number)

    async def drain(self) -> None:
        for rank in self._ranks:
            await rank.idle.wait()
        if self._handoffs is not None:
            await self._handoffs.settled()

    async def stop(self) -> None:
        handoffs, self._handoffs = self._handoffs, None
        if handoffs is not None:
            await handoffs.close()
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.cancel_and_wait()
        for one in self._native_events:
            one.close()
        self._native_events.clear()
        self._ranks.clear()
        self._running.clear()

    # Scripted answers and the end of answers.

    def _scripted(self, request: PreprocessedRequest, inputs: SimulationInput) -> SimulationInput:
        name = replay_id(request)
        answer = None if name is None else self._answers.get(name)
        if name is not None and answer is None and self._answers:
            logger.warning("output_replay_id %s is not in the trace; generating a random answer", name)
        if answer is not None:
            inputs.max_tokens = min(inputs.max_tokens, len(answer))
            inputs.script = dict(enumerate(answer))
        elif self._thoughts is not None:
            inputs.script = self._thoughts.marks(inputs.max_tokens) or None
        return inputs

    def _done(self, owner: Reply) -> None:
        self._running.pop(reply_of(owner), None)

    def _emit_last(self, sequence: SimulatedSequence[Reply]) -> None:
        if self._config.role is not DisaggregationMode.PREFILL:
            emit_last(sequence)
            return
        running = self._running.get(reply_of(sequence.owner))
        if running is None:
            return  # The request was cancelled during its last step.
        rank, session_number = running.rank, running.session_number
        words = {"engine": "mocker", "prompt_tokens": len(sequence.prompt)}
        output = prefill_output([sequence.last_token], words, usage_of(sequence), finish_reason=None)
        sequence.owner.item(output)
        if session_number is not None and self._handoffs is not None:
            self._handoffs.computed(session_number, len(sequence.prompt), lambda: rank.let_go(sequence))
            self._end_prefill(sequence)
        else:
            self._start(self._send_off(rank, sequence), "transfer")

    def _end_prefill(self, sequence: SimulatedSequence[Reply]) -> None:
        sequence.owner.item(EngineOutput([], 0, finish_reason="length", completion_usage=usage_of(sequence)))
        sequence.owner.finish()

    async def _send_off(self, rank: RankRunner, sequence: SimulatedSequence[Reply]) -> None:
        """Hold the blocks for the transfer time and end the answer; used where the destination is unknown."""
        await self._clock.sleep(rank.simulation.limits.transfer.transfer_ms(len(sequence.prompt)) / 1000)
        rank.let_go(sequence)
        self._end_prefill(sequence)

    async def _compute_when_reserved(self, running: Running, inputs: SimulationInput, owner: Reply) -> None:
        """Compute a prompt after the decode worker has reserved blocks (prefill side, destination-first order)."""
        assert self._handoffs is not None
        assert running.session_number is not None
        try:
            await self._handoffs.reserved(running.session_number)
        except DynamoException as error:
            self._fail(owner, error)
        else:
            running.sequence = running.rank.submit(inputs, owner, stays=True)

    async def _take_over(self, info: BootstrapInfo, running: Running, inputs: SimulationInput, owner: Reply) -> None:
        """Run the decode side of a handoff: reserve blocks on request, and decode after their transfer."""
        rank, limits = running.rank, running.rank.simulation.limits

        async def reserve() -> int:
            sequence = running.sequence = rank.submit(inputs, owner, is_remote=True)
            await rank.wait_for_blocks(sequence)
            blocks = rank.simulation.blocks_of(len(inputs.prompt))
            return blocks * limits.block_tokens - sequence.cached_tokens

        def activate() -> None:
            assert running.sequence is not None, "activated before blocks were reserved"
            rank.simulation.arrive(running.sequence, self._clock.now() * 1000)
            rank.wake()

        number, timeout_s = rank.simulation.dp_rank, self._config.handoff_timeout_ms / 1000
        handoff = Handoff(info, owner.request_id, limits.engine_type, timeout_s, number)
        try:
            await handoff.receive(reserve, activate)
        except DynamoException as error:
            if running.sequence is not None:
                rank.simulation.cancel(running.sequence)
                rank.wake()
            self._fail(owner, error)

    def _fail(self, owner: Reply, error: DynamoException) -> None:
        if self._running.pop(reply_of(owner), None) is not None:
            owner.fail(error)

    # Sockets and background tasks.

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.start(work, name)

    async def _open_handoffs(self) -> int | None:
        config = self._config
        if config.role is not DisaggregationMode.PREFILL or not config.bootstrap_ports:
            return None
        limits = self._ranks[0].simulation.limits
        timeout_s = config.handoff_timeout_ms / 1000
        self._handoffs = HandoffServer(timeout_s, limits.engine_type, limits.transfer, self._clock)
        return await self._handoffs.open(own_address(), config.bootstrap_ports[self._index])

    def _open_native_events(self, dp_rank: int) -> NativeEvents | None:
        config = self._config
        if not config.zmq_kv_events_ports:
            return None
        replay = config.zmq_replay_ports[self._index] + dp_rank if config.zmq_replay_ports else None
        host = setting("DYN_EVENT_PLANE_HOST", "*", str)
        opened = NativeEvents(host, config.zmq_kv_events_ports[self._index] + dp_rank, replay, dp_rank)
        self._native_events.append(opened)
        self._start(opened.answer(), f"kv-replay-{dp_rank}")
        return opened

    def _least_busy(self) -> RankRunner:
        if len(self._ranks) == 1:
            return self._ranks[0]
        return min(self._ranks, key=lambda rank: rank.requests)


def reply_of(owner: Reply) -> Reply:
    """Return the reply that was passed with a request, without the scripting wrapper."""
    return owner.reply if isinstance(owner, ScriptedReply) else owner


def own_address() -> str:
    """Return the address at which other hosts reach this machine."""
    configured = setting("DYN_HTTP_RPC_HOST", "", str) or setting("DYN_TCP_RPC_HOST", "", str)
    return configured or socket.gethostbyname(socket.gethostname())
