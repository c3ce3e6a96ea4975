"""The simulated engine loses no token and no block, for any sequence of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dynamo.mocker.simulation.scheduler import RankLimits, Simulation, StepResult
from dynamo.mocker.simulation.sequence import SequenceState, SimulatedSequence
from dynamo.mocker.simulation.timing import Timing
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.kv_events import KvEvent, Removed, Stored
from dynamo.tokens.hashing import block_hashes, sequence_hashes

SOURCE = TokenSource(5000, excluded={2}, seed=7)


@dataclass(eq=False)
class Client:
    """A client and the tokens that it received."""

    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


def simulation(timing: Timing | None = None, **limits: int | bool) -> Simulation[Client]:
    return Simulation(RankLimits(**{"block_tokens": 4, "num_blocks": 64, **limits}), timing or Timing(), SOURCE)  # type: ignore[arg-type]


def deliver(result: StepResult[Client]) -> None:
    assert len(result.sequences) == len(result.tokens)
    for sequence, token in zip(result.sequences, result.tokens, strict=True):
        sequence.owner.tokens.append(token)
    for sequence in result.finished:
        sequence.owner.tokens.append(sequence.last_token)
        sequence.owner.is_done = True


def run(machine: Simulation[Client], steps_max: int = 1000) -> list[StepResult[Client]]:
    results = []
    while not machine.is_idle:
        results.append(machine.step(0))
        deliver(results[-1])
        machine.validate()
        assert len(results) < steps_max, "it does not come to an end"
    return results


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def test_single_request_generates_exactly_max_tokens() -> None:
    machine = simulation()
    client = Client()
    machine.submit(client, prompt(10), 13, 0)
    results = run(machine)
    assert client.is_done
    assert len(client.tokens) == 13
    assert 2 not in client.tokens
    assert len(results) == 13
    assert machine.pool.used == 0


def test_response_of_one_token_has_no_decode_step() -> None:
    machine = simulation()
    client = Client()
    machine.submit(client, prompt(4), 1, 0)
    assert len(run(machine)) == 1
    assert (client.is_done, len(client.tokens)) == (True, 1)


def test_step_durations_follow_the_timing_model() -> None:
    machine = simulation()
    machine.submit(Client(), prompt(10), 3, 0)
    durations = [result.duration_ms for result in run(machine)]
    timing = Timing()
    assert durations == [timing.prefill_ms(10), timing.decode_ms(11, 256), timing.decode_ms(12, 256)]


def test_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    machine = simulation(max_num_batched_tokens=8)
    early, late = Client(), Client()
    machine.submit(early, prompt(3), 9, 0)
    deliver(machine.step(0))
    machine.submit(late, prompt(22, 500), 2, 0)
    counts = []
    for _ in range(5):
        deliver(machine.step(0))
        machine.validate()
        counts.append((len(early.tokens), len(late.tokens)))
    assert counts == [(2, 0), (3, 0), (4, 0), (5, 1), (6, 2)]  # 7 + 7 + 7 + 1 tokens: decoding takes one of 8.


def test_unchunked_prompt_waits_for_a_step_that_fits_it() -> None:
    machine = simulation(max_num_batched_tokens=8, enable_chunked_prefill=False)
    clients = [Client() for _ in range(3)]
    for index, client in enumerate(clients):
        machine.submit(client, prompt(5, 100 * index), 1, 0)
    deliver(machine.step(0))
    assert [len(client.tokens) for client in clients] == [1, 0, 0]
    run(machine)
    assert [len(client.tokens) for client in clients] == [1, 1, 1]


def test_unchunked_prompt_over_the_token_budget_runs_alone() -> None:
    machine = simulation(max_num_batched_tokens=8, enable_chunked_prefill=False)
    client = Client()
    machine.submit(client, prompt(20), 2, 0)
    run(machine)
    assert client.is_done


def test_running_sequences_do_not_exceed_max_num_seqs() -> None:
    machine = simulation(max_num_seqs=2)
    for index in range(5):
        machine.submit(Client(), prompt(3, 100 * index), 4, 0)
    for result in run(machine):
        assert len(result.sequences) + len(result.finished) <= 2


def test_shared_prefix_is_computed_once() -> None:
    machine = simulation()
    machine.submit(Client(), prompt(12), 1, 0)
    run(machine)
    again = machine.submit(Client(), [*prompt(12), 7, 8], 1, 0)
    result = machine.step(0)
    assert again.cached_tokens == 12
    assert result.duration_ms == Timing().prefill_ms(2)
    assert result.events == []


def test_last_block_of_a_fully_cached_prompt_is_recomputed() -> None:
    machine = simulation()
    machine.submit(Client(), prompt(12), 1, 0)
    run(machine)
    again = machine.submit(Client(), prompt(12), 1, 0)
    assert machine.step(0).duration_ms == Timing().prefill_ms(4)
    assert again.cached_tokens == 8


def test_next_turn_reuses_the_cached_response_of_the_conversation() -> None:
    machine = simulation()
    client = Client()
    machine.submit(client, prompt(10), 9, 0)
    run(machine)
    history = prompt(10) + client.tokens
    again = machine.submit(Client(), [*history, 1, 1, 1], 1, 0)
    run(machine)
    assert again.cached_tokens == 16  # 18 tokens of the first turn were computed: four complete blocks.


def test_requests_with_different_hash_seeds_share_no_blocks() -> None:
    machine = simulation()
    machine.submit(Client(), prompt(12), 1, 0)
    run(machine)
    again = machine.submit(Client(), [*prompt(12), 7], 1, 0, hash_seed=99)
    run(machine)
    assert again.cached_tokens == 0


def test_disabled_prefix_caching_stores_and_publishes_no_blocks() -> None:
    machine = simulation(enable_prefix_caching=False)
    for _ in range(2):
        sequence = machine.submit(Client(), prompt(12), 9, 0)
        assert all(result.events == [] for result in run(machine))
        assert sequence.cached_tokens == 0
    assert machine.pool.used == len(machine.pool.inactive) == 0


def test_event_block_hashes_equal_those_of_routers() -> None:
    machine = simulation()
    client = Client()
    machine.submit(client, prompt(6), 7, 0)
    events = [event for result in run(machine) for event in result.events]
    tokens = (prompt(6) + client.tokens)[:12]
    stored = [(block.block_hash, block.tokens_hash) for event in events for block in event.blocks]  # type: ignore[union-attr]
    hashes = block_hashes(tokens, 4)
    assert stored == list(zip(sequence_hashes(hashes), hashes, strict=True))
    assert [event.parent_hash for event in events] == [None, *sequence_hashes(hashes)[:2]]  # type: ignore[union-attr]


@pytest.mark.parametrize("preempts_oldest", [False, True])
def test_preempted_request_is_recomputed_without_losing_tokens(preempts_oldest: bool) -> None:
    machine = simulation(num_blocks=9, preempts_oldest=preempts_oldest)
    clients = [Client() for _ in range(4)]
    sequences = [machine.submit(client, prompt(5, 100 * index), 20, 0) for index, client in enumerate(clients)]
    run(machine)
    assert machine.preemptions > 0
    for client, sequence in zip(clients, sequences, strict=True):
        assert client.tokens == SOURCE.slice(sequence.offset, sequence.offset + 20)


def test_lifo_preempts_the_newest_request_and_fifo_the_oldest() -> None:
    for preempts_oldest, survivor in ((False, 0), (True, 1)):
        machine = simulation(num_blocks=4, preempts_oldest=preempts_oldest)
        sequences = [machine.submit(Client(), prompt(7, 100 * index), 8, 0) for index in range(2)]
        while not machine.preemptions:
            machine.step(0)
        assert list(machine.decoding) == [sequences[survivor]]
        assert machine.waiting[0] is sequences[1 - survivor]


def two_that_do_not_fit(**limits: int | bool) -> tuple[Simulation[Client], list[SimulatedSequence[Client]]]:
    """Stopped in front of the step in which one of them must be preempted."""
    machine = simulation(num_blocks=4, **limits)  # type: ignore[arg-type]
    sequences = [machine.submit(Client(), prompt(7, 100 * index), 8, 0) for index in range(2)]
    deliver(machine.step(0))
    deliver(machine.step(0))
    assert machine.preemptions == 0
    return machine, sequences


def test_preempted_request_is_first_in_the_waiting_queue() -> None:
    machine, (_, victim) = two_that_do_not_fit()
    machine.submit(Client(), prompt(1, 900), 1, 0)
    machine.step(0)
    assert machine.preemptions == 1
    assert len(machine.waiting) == 2
    assert machine.waiting[0] is victim


def test_preemption_does_not_change_the_initial_cached_token_count() -> None:
    machine = simulation(num_blocks=5)
    machine.submit(Client(), prompt(3), 4, 0)
    victim = machine.submit(Client(), prompt(15, 100), 5, 0)
    durations = [result.duration_ms for result in run(machine)]
    assert machine.preemptions == 1
    assert Timing().prefill_ms(5) in durations, "its own blocks were there when it came back"
    assert victim.cached_tokens == 0


def test_prompts_are_admitted_while_blocks_are_free() -> None:
    machine = simulation(num_blocks=200)
    machine.submit(Client(), prompt(4 * 100), 5, 0)
    machine.submit(Client(), prompt(4 * 99, 1000), 5, 0)
    machine.submit(Client(), prompt(4 * 2, 2000), 5, 0)
    assert machine.step(0).load.waiting_requests == 1, "the released simulation keeps no blocks free for growth"
    run(machine)


@pytest.mark.parametrize("state", [SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.DECODING])
def test_cancelled_request_releases_all_blocks(state: SequenceState) -> None:
    machine = simulation(max_num_batched_tokens=8, max_num_seqs=1)
    sequence = machine.submit(Client(), prompt(20), 50, 0)
    while sequence.state is not state:
        machine.step(0)
    machine.cancel(sequence)
    machine.validate()
    assert machine.is_idle
    assert machine.pool.used == 0
    assert machine.load().active_prefill_tokens == 0
    machine.cancel(sequence)


def test_load_counts_requests_blocks_and_tokens_to_compute() -> None:
    machine = simulation(max_num_batched_tokens=8, max_num_seqs=1)
    machine.submit(Client(), prompt(20), 50, 0)
    machine.submit(Client(), prompt(6), 50, 0)
    load = machine.step(0).load
    assert (load.running_requests, load.waiting_requests) == (1, 1)
    assert (load.kv_used_blocks, load.kv_total_blocks) == (5, 64)
    assert load.active_prefill_tokens == 12 + 6


def test_times_use_the_clock_of_the_caller() -> None:
    machine = simulation(Timing())
    sequence = machine.submit(Client(), prompt(8), 2, 1000)
    now = 1000.0
    while not machine.is_idle:
        now += machine.step(now).duration_ms
    assert sequence.first_token_ms == pytest.approx(1000 + Timing().prefill_ms(8))
    assert sequence.finished_ms == now


class Life(RuleBasedStateMachine):
    """Requests arrive, run and are dropped in any order; the block accounting is consistent after every step."""

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        caching=st.booleans(),
        chunked=st.booleans(),
        oldest=st.booleans(),
    )
    def begin(
        self, num_blocks: int, max_num_seqs: int, budget: int, caching: bool, chunked: bool, oldest: bool
    ) -> None:
        self.machine = simulation(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            preempts_oldest=oldest,
        )
        self.cache: dict[int, int | None] = {}
        self.submitted: list[SimulatedSequence[Client]] = []
        self.cancelled: set[SimulatedSequence[Client]] = set()

    @rule(target=sequences, length=st.integers(1, 16), start=st.integers(0, 1), max_tokens=st.integers(1, 8))
    def submit(self, length: int, start: int, max_tokens: int) -> SimulatedSequence[Client]:
        sequence = self.machine.submit(Client(), prompt(length, 1000 * start), max_tokens, 0)
        self.submitted.append(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: SimulatedSequence[Client]) -> None:
        if not sequence.owner.is_done:
            self.cancelled.add(sequence)
        self.machine.cancel(sequence)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.machine.is_idle:
                result = self.machine.step(0)
                assert result.duration_ms > 0, "a step that did nothing"
                deliver(result)
                self.apply_events(result.events)

    def apply_events(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                parent = event.parent_hash
                assert parent is None or parent in self.cache
                for block in event.blocks:
                    assert block.block_hash not in self.cache
                    self.cache[block.block_hash] = parent
                    parent = block.block_hash
            elif isinstance(event, Removed):
                for block_hash in event.block_hashes:
                    del self.cache[block_hash]
                    assert block_hash not in self.cache.values(), "a child outlived its parent"

    @invariant()
    def balances(self) -> None:
        if hasattr(self, "machine"):
            self.machine.validate()

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        steps = 0
        while not self.machine.is_idle:
            result = self.machine.step(0)
            deliver(result)
            self.apply_events(result.events)
            self.machine.validate()
            steps += 1
            assert steps < 5000, "it does not come to an end"
        assert self.machine.pool.used == 0
        assert self.cache.keys() == self.machine.pool.inactive
        assert self.machine.load().active_prefill_tokens == 0
        for sequence in self.submitted:
            if sequence not in self.cancelled:
                assert sequence.owner.is_done
                assert sequence.owner.tokens == SOURCE.slice(sequence.offset, sequence.offset + sequence.max_tokens)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_forward_pass_metrics_equal_those_of_the_released_mocker() -> None:
    machine = simulation(block_tokens=16, max_num_batched_tokens=128)
    for length, answer, start in ((300, 6, 50), (100, 4, 1)):
        machine.submit(Client(), prompt(length, start), answer, 0)
    machine.waiting.rotate()
    reported = [result.forward_pass.scheduled_requests for result in run(machine)]
    assert [(one.num_prefill_requests, one.sum_prefill_tokens, one.sum_prefill_kv_tokens) for one in reported] == [
        (2, 128, 0), (1, 127, 28), (1, 127, 155), (1, 18, 282), *[(0, 0, 0)] * 5,
    ]  # fmt: skip
    assert [(one.num_decode_requests, one.sum_decode_kv_tokens) for one in reported] == [
        (0, 0), (1, 101), (1, 102), (1, 103), (1, 301), (1, 302), (1, 303), (1, 304), (1, 305),
    ]  # fmt: skip
    assert [one.var_prefill_length for one in reported] == [10000.0] + [0.0] * 8


def test_queued_requests_are_counted_by_prefill_and_decode() -> None:
    machine = simulation(num_blocks=4, max_num_seqs=2)
    for start in (0, 50, 100):
        machine.submit(Client(), prompt(7, start), 8, 0)
    results = run(machine)
    first = results[0].forward_pass.queued_requests
    assert (first.num_prefill_requests, first.sum_prefill_tokens, first.num_decode_requests) == (1, 7, 0)
    preempted = [result.forward_pass.queued_requests for result in results]
    assert max(one.num_decode_requests for one in preempted) == 1
    assert max(one.sum_decode_kv_tokens for one in preempted) > 7
    assert preempted[-1].num_prefill_requests == preempted[-1].num_decode_requests == 0


def test_decode_kv_variance_reflects_the_context_lengths() -> None:
    machine = simulation()
    for length in (3, 6):
        machine.submit(Client(), prompt(length), 5, 0)
    reported = [result.forward_pass.scheduled_requests for result in run(machine)]
    assert [one.sum_decode_kv_tokens for one in reported] == [0, 4 + 7, 5 + 8, 6 + 9, 7 + 10]
    assert [one.var_decode_kv_tokens for one in reported] == [0.0] + [1.5**2] * 4
