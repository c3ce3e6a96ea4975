"""MockerEngine: the simulation, lived through in real time.

    submit ──▶ Simulation ──step()──▶ wait until the step's end ──▶ tokens to the replies, events to the host

Steps end at absolute times, so an oversleep of one is made up by the next. Where steps take no time the loop still gets
its turns, or nothing would be sent: with first tokens at once, else when a turn is worth its cost.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine

from dynamo.backend.disagg import DisaggregationMode, bootstrap_of, leg_of, prefill_output, prefill_request
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.llm.hub import resolve_model
from dynamo.mocker.config import MockerConfig, demo_model
from dynamo.mocker.convert import Asked, ModelFacts, last_output, read_request, replay_id, usage_of
from dynamo.mocker.events import EngineMetrics, StepReporter
from dynamo.mocker.handoff import Handoff, HandoffServer
from dynamo.mocker.native_events import NativeEvents
from dynamo.mocker.scripts import ScriptedReply, read_answers
from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.engines import simulate
from dynamo.mocker.simulation.sequence import Sequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.engine import BootstrapInfo, EngineOutput, PreprocessedRequest
from dynamo.protocols.native import SGLANG_CAPABILITY
from dynamo.runtime.request_plane.base import Reply

LATE_MAX_S = 0.05  # A stall longer than this is not made up for: a real engine would not run faster after it.

TURN_TOKENS = 256  # Written before the loop gets a turn where steps take no time: about a tenth of a millisecond.


class Rank:
    """One data-parallel rank: a simulation and the task that steps it."""

    def __init__(self, simulation: Batching[Reply], reporter: StepReporter, clock: Clock) -> None:
        self.simulation = simulation
        self.idle = asyncio.Event()
        self._reporter = reporter
        self._clock = clock
        self._wake = asyncio.Event()
        self._last_end = 0.0
        self._unsent = 0
        self._say: Callable[[Sequence[Reply]], None] = say_last

    @property
    def requests(self) -> int:
        """How many wait or run."""
        simulation = self.simulation
        running = len(simulation.decoding) + (simulation.partial is not None)
        return running + len(simulation.waiting) + len(simulation.loading) + len(simulation.loaded)

    def submit(self, asked: Asked, reply: Reply, *, is_remote: bool = False, stays: bool = False) -> Sequence[Reply]:
        """Begins with the next step."""
        self.wake()
        now_ms = self._clock.now() * 1000
        return self.simulation.submit(
            reply, asked.prompt, asked.max_tokens, now_ms, asked.hash_seed, is_remote=is_remote, stays=stays
        )

    def let_go(self, sequence: Sequence[Reply]) -> None:
        """The blocks of a prompt that was computed for another worker."""
        self.simulation.let_go(sequence)
        self._reporter.rest()

    def wake(self) -> None:
        """Something came to do."""
        self.idle.clear()
        self._wake.set()

    async def run(self, done: Callable[[Reply], None], say: Callable[[Sequence[Reply]], None] | None = None) -> None:
        """Steps as long as there is work, and waits for work; `done` hears of every answer that is complete.

        `say` says the last token of an answer in place of `say_last`.
        """
        self._say = say or say_last
        end = 0.0
        while True:
            while self.simulation.is_idle:
                self._reporter.rest()
                await self._sleep_until_work()
                end = self._last_end = self._clock.now()
            result = self.simulation.step(end * 1000)
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
            self._say(sequence)
            done(sequence.owner)
        now, before = self._clock.now(), self._last_end
        self._last_end = now
        self._reporter.report(result, now * 1000, now - before)


def say_last(sequence: Sequence[Reply]) -> None:
    """The last token of an answer, and its end."""
    sequence.owner.item(last_output(sequence))
    sequence.owner.finish()


class MockerEngine:
    """An `LLMEngine` that answers random tokens at the pace of a GPU."""

    def __init__(self, config: MockerConfig, index: int = 0, clock: Clock | None = None) -> None:
        self._config = config
        self._index = index
        """Which of the process's workers it stands behind."""
        self._clock = clock or SystemClock()
        self._facts: ModelFacts | None = None
        self._thoughts = config.thoughts()
        self._answers: dict[str, list[int]] = {}
        self._ranks: list[Rank] = []
        self._running: dict[Reply, tuple[Rank, Sequence[Reply]]] = {}
        self._rooms: dict[Reply, int] = {}
        """Where the decode workers of requests are met that are computed here."""
        self._handoffs: HandoffServer | None = None
        self._native_events: list[NativeEvents] = []
        self._tasks: TaskOwner | None = None

    async def start(self, host: EngineHost) -> EngineConfig:
        config = self._config
        path = await asyncio.to_thread(resolve_model, config.model_path or demo_model())
        facts = self._facts = await asyncio.to_thread(ModelFacts.read, path, config)
        source = await asyncio.to_thread(TokenSource, facts.answer_vocab_size, facts.eos_token_ids)
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
            reporter = StepReporter(
                host,
                EngineMetrics(host.metrics, engine, facts.name),
                simulation,
                tells_cache=config.role.tells_cache and config.enable_prefix_caching,
                native_events=self._open_native_events(rank_index),
                is_traced=is_traced,
            )
            rank = Rank(simulation, reporter, self._clock)
            rank.idle.set()
            self._ranks.append(rank)
            self._tasks.start(rank.run(self._done, self._say_last), f"rank-{rank_index}")
        bootstrap_port = await self._open_handoffs()
        routing = config.routing()
        return EngineConfig(
            model_path=path,
            served_model_name=facts.name,
            context_length=facts.context_length,
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
        leg = leg_of(request) if role is DisaggregationMode.DECODE else None
        asked = read_request(
            prefill_request(request) if role is DisaggregationMode.PREFILL else request, self._facts, len(self._ranks)
        )
        asked = self._scripted(request, asked)
        owner: Reply = reply if asked.script is None else ScriptedReply(reply, asked.script)
        rank = self._least_busy() if asked.dp_rank is None else self._ranks[asked.dp_rank]
        stays = role is DisaggregationMode.PREFILL
        sequence = rank.submit(asked, owner, is_remote=leg is not None, stays=stays)
        self._running[reply] = rank, sequence
        meeting = bootstrap_of(request)
        if stays and meeting is not None and self._handoffs is not None:
            self._rooms[owner] = meeting.bootstrap_room
        if isinstance(leg, BootstrapInfo):
            self._start(self._take_over(leg, rank, sequence, reply), "handoff")
        elif leg is not None:
            rank.simulation.arrive(sequence, 0.0)

    def cancel(self, reply: Reply) -> None:
        found = self._running.pop(reply, None)
        if found is not None:
            rank, sequence = found
            rank.simulation.cancel(sequence)
            room = self._rooms.pop(sequence.owner, None)
            if room is not None and self._handoffs is not None:
                self._handoffs.lost(room)

    async def drain(self) -> None:
        for rank in self._ranks:
            await rank.idle.wait()

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
        self._rooms.clear()

    # Answers that are not random, and how they end.

    def _scripted(self, request: PreprocessedRequest, asked: Asked) -> Asked:
        name = replay_id(request)
        if name is not None and self._config.response_replay_trace_path is not None:
            answer = self._answers.get(name)
            if answer is None:
                raise InvalidArgument(f"Invalid request: output_replay_id {name!r} is not in the trace")
            asked.max_tokens = min(asked.max_tokens, len(answer))
            asked.script = answer
        elif self._thoughts is not None:
            asked.script = self._thoughts.marks(asked.max_tokens) or None
        return asked

    def _done(self, owner: Reply) -> None:
        self._running.pop(owner.reply if isinstance(owner, ScriptedReply) else owner, None)

    def _say_last(self, sequence: Sequence[Reply]) -> None:
        if self._config.role is not DisaggregationMode.PREFILL:
            say_last(sequence)
            return
        rank = self._rank_of(sequence)
        room = self._rooms.pop(sequence.owner, None)
        words = {"engine": "mocker", "prompt_tokens": len(sequence.prompt)}
        output = prefill_output([sequence.last_token], words, usage_of(sequence), finish_reason=None)
        sequence.owner.item(output)
        if room is not None and self._handoffs is not None:
            self._handoffs.computed(room, lambda: rank.let_go(sequence))
            self._end_prefill(sequence)
        else:
            self._start(self._send_off(rank, sequence), "transfer")

    def _end_prefill(self, sequence: Sequence[Reply]) -> None:
        sequence.owner.item(EngineOutput([], 0, finish_reason="length", completion_usage=usage_of(sequence)))
        sequence.owner.finish()

    async def _send_off(self, rank: Rank, sequence: Sequence[Reply]) -> None:
        """Nobody says where the blocks go to: they are on their way for as long as it takes, and then the answer ends."""
        await self._clock.sleep(rank.simulation.limits.transfer.transfer_ms(len(sequence.prompt)) / 1000)
        rank.let_go(sequence)
        self._end_prefill(sequence)

    async def _take_over(self, info: BootstrapInfo, rank: Rank, sequence: Sequence[Reply], reply: Reply) -> None:
        """The decode side: waits for the prompt, and then for its blocks."""
        handoff = Handoff(info, self._config.handoff_timeout_ms / 1000)
        try:
            await handoff.ready()
            transfer = rank.simulation.limits.transfer
            missing = sequence.cached_tokens if transfer.only_missing else 0
            took_s = transfer.transfer_ms(max(len(sequence.prompt) - missing, 0)) / 1000
            await self._clock.sleep(took_s)
            rank.simulation.arrive(sequence, self._clock.now() * 1000)
            rank.wake()
        except DynamoException as error:
            if self._running.pop(reply, None) is not None:
                rank.simulation.cancel(sequence)
                reply.fail(error)
        finally:
            await handoff.done()

    # What is opened.

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        assert self._tasks is not None
        self._tasks.start(work, name)

    async def _open_handoffs(self) -> int | None:
        config = self._config
        if config.role is not DisaggregationMode.PREFILL or not config.bootstrap_ports:
            return None
        self._handoffs = HandoffServer(config.handoff_timeout_ms / 1000)
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

    def _rank_of(self, sequence: Sequence[Reply]) -> Rank:
        owner = sequence.owner
        return self._running[owner.reply if isinstance(owner, ScriptedReply) else owner][0]

    def _least_busy(self) -> Rank:
        if len(self._ranks) == 1:
            return self._ranks[0]
        return min(self._ranks, key=lambda rank: rank.requests)


def own_address() -> str:
    """Where others reach this machine."""
    told = setting("DYN_HTTP_RPC_HOST", "", str) or setting("DYN_TCP_RPC_HOST", "", str)
    return told or socket.gethostbyname(socket.gethostname())
