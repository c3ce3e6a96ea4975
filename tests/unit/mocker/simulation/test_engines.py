"""Every engine's simulation loses no request, no token and no block, and reports the contents of its caches."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.engines import ENGINES, simulate
from dynamo.mocker.simulation.rules import EngineType, EvictionName, HostRules, RankLimits, SglangRules, TransferRules
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.mocker.simulation.step import StepResult
from dynamo.mocker.simulation.timing import Timing
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.protocols.kv_events import KvEvent, Removed, Stored

SOURCE = TokenSource(5000, excluded={2}, seed=7)
NAMES = sorted(ENGINES)


@dataclass(eq=False)
class Client:
    """A client and the tokens that it received."""

    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def engine(name: EngineType, **limits: Any) -> Batching[Client]:
    return simulate(
        RankLimits(**{"block_tokens": 4, "num_blocks": 64, "engine_type": name, **limits}), Timing(), SOURCE
    )


class Driver:
    """Steps an engine through time, and records its outputs."""

    def __init__(self, machine: Batching[Client]) -> None:
        self.machine = machine
        self.now_ms = 0.0
        self.cache: set[int] = set()
        self.host: set[int] = set()
        self.results: list[StepResult[Client]] = []

    def send_request(self, tokens: list[int], max_tokens: int, **how: Any) -> SimulatedSequence[Client]:
        return self.machine.submit(Client(), tokens, max_tokens, self.now_ms, **how)

    def step(self) -> StepResult[Client]:
        result = self.machine.step(self.now_ms)
        self.now_ms += result.duration_ms
        for sequence, token in zip(result.sequences, result.tokens, strict=True):
            sequence.owner.tokens.append(token)
        for sequence in result.finished:
            sequence.owner.tokens.append(sequence.last_token)
            sequence.owner.is_done = True
        apply_events(self.cache, result.events)
        apply_events(self.host, result.host_events)
        self.results.append(result)
        self.machine.validate()
        pool = self.machine.pool
        readable = {*pool.active, *pool.inactive}
        assert self.cache == (readable if self.machine.limits.enable_prefix_caching else set())
        if self.machine.host is not None:
            assert self.host == set(self.machine.host.held)
        return result

    def run(self, steps_max: int = 5000) -> None:
        for _ in range(steps_max):
            if self.machine.is_idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")


def apply_events(cache: set[int], events: list[KvEvent]) -> None:
    for event in events:
        if isinstance(event, Stored):
            for block in event.blocks:
                assert block.block_hash not in cache, "a block was stored twice"
                cache.add(block.block_hash)
        elif isinstance(event, Removed):
            for block_hash in event.block_hashes:
                cache.remove(block_hash)


class Life(RuleBasedStateMachine):
    """Requests arrive, are cancelled and computed in any order, locally and remotely."""

    sequences: Bundle[SimulatedSequence[Client]] = Bundle("sequences")

    @initialize(
        name=st.sampled_from(NAMES),
        eviction=st.sampled_from(["lineage", "lru", "multi_lru"]),
        num_blocks=st.integers(6, 14),
        block_tokens=st.sampled_from([1, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 30),
        caching=st.booleans(),
        chunked=st.booleans(),
        host_blocks=st.integers(0, 12),
        policy=st.sampled_from(["fifo", "lpm"]),
    )
    def build(
        self,
        name: EngineType,
        eviction: EvictionName,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        host_blocks: int,
        policy: Any,
    ) -> None:
        limits = RankLimits(
            num_blocks * 4 // block_tokens,
            block_tokens,
            max_num_seqs,
            budget,
            caching,
            chunked,
            engine_type=name,
            eviction=eviction,
            sglang=SglangRules(policy, budget * 2, budget, 6, 0.5),
            host=HostRules(host_blocks, 1_000_000, 0.5, 0.2) if host_blocks else None,
        )
        self.driver = Driver(simulate(limits, Timing(), SOURCE))
        self.submitted: list[SimulatedSequence[Client]] = []
        self.cancelled: set[SimulatedSequence[Client]] = set()

    @rule(
        target=sequences,
        length=st.integers(1, 16),
        start=st.integers(0, 1),
        max_tokens=st.integers(1, 8),
        is_remote=st.booleans(),
        stays=st.booleans(),
    )
    def submit(
        self, length: int, start: int, max_tokens: int, is_remote: bool, stays: bool
    ) -> SimulatedSequence[Client]:
        tokens = prompt(length, 1000 * start)
        sequence = self.driver.send_request(tokens, max_tokens, is_remote=is_remote, stays=stays)
        self.submitted.append(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def cancel(self, sequence: SimulatedSequence[Client]) -> None:
        if not sequence.owner.is_done:
            self.cancelled.add(sequence)
        self.driver.machine.cancel(sequence)

    @rule(sequence=sequences, delay_ms=st.floats(0, 30))
    def arrive(self, sequence: SimulatedSequence[Client], delay_ms: float) -> None:
        if sequence.is_remote:
            self.driver.machine.arrive(sequence, self.driver.now_ms + delay_ms)

    @rule(sequence=sequences)
    def let_go(self, sequence: SimulatedSequence[Client]) -> None:
        self.driver.machine.let_go(sequence)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.driver.machine.is_idle:
                self.driver.step()

    @invariant()
    def balances(self) -> None:
        if hasattr(self, "driver"):
            self.driver.machine.validate()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        machine = self.driver.machine
        for sequence in self.submitted:
            machine.let_go(sequence)
            if sequence.is_remote:
                machine.arrive(sequence, self.driver.now_ms)
        self.driver.run()
        assert machine.pool.used == 0
        assert machine.load().active_prefill_tokens == 0
        for sequence in self.submitted:
            if sequence not in self.cancelled:
                assert sequence.owner.is_done, "a request was lost"
                assert sequence.owner.tokens == SOURCE.slice(sequence.offset, sequence.offset + sequence.max_tokens)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_generates_exactly_max_tokens(name: EngineType) -> None:
    driver = Driver(engine(name))
    requested = [driver.send_request(prompt(10 + one, 100 * one), 3 + one) for one in range(6)]
    driver.run()
    assert [len(sequence.owner.tokens) for sequence in requested] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("name", NAMES)
def test_computed_prompt_is_served_from_the_prefix_cache(name: EngineType) -> None:
    driver = Driver(engine(name))
    driver.send_request(prompt(21), 2)
    driver.run()
    again = driver.send_request(prompt(21), 2)
    driver.run()
    assert again.cached_tokens == 20


@pytest.mark.parametrize("name", NAMES)
def test_remote_prefill_occupies_blocks_but_no_compute_time(name: EngineType) -> None:
    driver = Driver(engine(name))
    sequence = driver.send_request(prompt(20), 3, is_remote=True)
    driver.step()
    assert driver.machine.is_idle, "there is nothing to do until the blocks are there"
    assert driver.machine.pool.used >= 5, "but the room is held"
    driver.machine.arrive(sequence, 40.0)
    driver.run()
    assert all(result.forward_pass.scheduled_requests.sum_prefill_tokens == 0 for result in driver.results)
    assert 40.0 < sequence.first_token_ms < 60.0
    assert len(sequence.owner.tokens) == 3
    assert driver.machine.admitted_tokens == 0, "the share of reused tokens is that of computed prompts"


@pytest.mark.parametrize("name", NAMES)
def test_prefill_blocks_remain_allocated_until_released(name: EngineType) -> None:
    driver = Driver(engine(name))
    sequence = driver.send_request(prompt(20), 1, stays=True)
    driver.run()
    assert sequence.owner.is_done
    assert driver.machine.pool.used == 5
    driver.machine.let_go(sequence)
    assert driver.machine.pool.used == 0
    driver.machine.validate()


@pytest.mark.parametrize("name", NAMES)
def test_step_reserves_blocks_for_one_remote_prompt_unless_another_one_arrives(name: EngineType) -> None:
    driver = Driver(engine(name))
    driver.send_request(prompt(8), 20)
    driver.step()
    first, *others = (driver.send_request(prompt(8, 100 * one), 2, is_remote=True) for one in range(2, 6))
    driver.step()
    assert list(driver.machine.waiting) == others
    driver.step()
    assert list(driver.machine.waiting) == others[1:], "the next step reserves for the next one"
    driver.machine.arrive(first, driver.now_ms)
    driver.step()
    assert not driver.machine.waiting
    for one in others:
        driver.machine.arrive(one, driver.now_ms)
    driver.run()
    assert all(one.owner.is_done for one in (first, *others))


@pytest.mark.parametrize("name", NAMES)
def test_idle_rank_reserves_blocks_without_a_step(name: EngineType) -> None:
    driver = Driver(engine(name))
    for one in range(3):
        driver.send_request(prompt(8, 100 * one), 2, is_remote=True)
    driver.machine.reserve(5.0)
    assert not driver.machine.waiting
    assert driver.machine.is_idle
    driver.send_request(prompt(8, 900), 2)
    driver.machine.reserve(6.0)
    assert len(driver.machine.waiting) == 1, "a prompt that is computed here needs a step"


@pytest.mark.parametrize("name", NAMES)
def test_rank_with_reserved_blocks_coasts_until_they_are_filled(name: EngineType) -> None:
    driver = Driver(engine(name))
    driver.send_request(prompt(8), 40)
    driver.step()
    remote = driver.send_request(prompt(8, 500), 2, is_remote=True)
    driver.step()
    driver.step()
    assert driver.machine.steady_steps > 1
    driver.machine.arrive(remote, driver.now_ms + 1.0)
    assert driver.machine.steady_steps == 0
    driver.step()
    assert driver.machine.steady_steps == 0, "the blocks arrived during the step"


def test_sglang_inserts_a_prompt_for_another_worker_into_its_tree_when_that_worker_has_it() -> None:
    cached = {}
    for name in NAMES:
        driver = Driver(engine(name, max_num_batched_tokens=12, sglang=SglangRules(chunked_prefill_size=12)))
        sent = driver.send_request(prompt(21), 1, stays=True)
        driver.run()
        before = driver.send_request(prompt(21), 1)
        driver.run()
        driver.machine.let_go(sent)
        after = driver.send_request(prompt(21), 1)
        driver.run()
        cached[name] = before.cached_tokens, after.cached_tokens
    assert cached == {"vllm": (20, 20), "trtllm": (20, 20), "sglang": (12, 20)}, "the first chunk is in the tree before"


def test_sglang_ends_chunks_at_the_end_of_a_page_and_counts_whole_pages() -> None:
    driver = Driver(engine("sglang", sglang=SglangRules(chunked_prefill_size=18)))
    driver.send_request(prompt(5), 1)
    driver.send_request(prompt(30, 500), 1)
    driver.run()
    computed = [result.forward_pass.scheduled_requests.sum_prefill_tokens for result in driver.results]
    assert computed == [5 + 8, 16, 6], "5 tokens count as 8 of 18, and 10 are cut to 8"


def test_time_of_a_step_follows_from_the_mean_lengths_of_its_prompts_in_whole_tokens() -> None:
    driver = Driver(engine("vllm"))
    driver.send_request(prompt(8), 1)
    driver.run()
    driver.send_request(prompt(17), 1)
    driver.send_request(prompt(12, 500), 1)
    step = driver.step()
    assert step.forward_pass.scheduled_requests.sum_prefill_tokens == 9 + 12
    assert step.duration_ms == Timing().prefill_ms(2 * (29 // 2 - 8 // 2)), "and not of 21 tokens"


def test_trtllm_admits_only_requests_that_fit_until_their_end() -> None:
    driver = Driver(engine("trtllm", num_blocks=10))
    first, second = driver.send_request(prompt(8), 21), driver.send_request(prompt(8, 500), 21)
    driver.step()
    assert driver.machine.pool.used == 7, "2 blocks for the prompt, 5 for the answer"
    assert list(driver.machine.waiting) == [second]
    driver.run()
    assert driver.machine.preemptions == 0
    assert second.first_token_ms > first.finished_ms


def test_sglang_runs_prefill_and_decode_in_separate_steps() -> None:
    driver = Driver(engine("sglang"))
    driver.send_request(prompt(8), 6)
    driver.step()
    driver.step()
    driver.send_request(prompt(8, 500), 6)
    driver.run()
    kinds = [(one.num_prefill_requests, one.num_decode_requests) for one in (
        result.forward_pass.scheduled_requests for result in driver.results
    )]  # fmt: skip
    assert kinds[:4] == [(1, 0), (0, 1), (1, 0), (0, 2)]


def test_sglang_retracts_the_shortest_output_and_raises_its_estimate() -> None:
    rules = SglangRules(schedule_conservativeness=0.05)
    driver = Driver(engine("sglang", num_blocks=14, sglang=rules))
    machine = driver.machine
    driver.send_request(prompt(8), 40)
    for _ in range(10):
        driver.step()
    young = driver.send_request(prompt(8, 500), 20)
    before = machine.ratio  # type: ignore[attr-defined]
    for _ in range(30):
        if not machine.preemptions:
            driver.step()
    assert list(machine.waiting) == [young]
    assert machine.ratio > before  # type: ignore[attr-defined]
    driver.run()
    assert len(young.owner.tokens) == 20


def test_sglang_lpm_policy_runs_the_longest_cached_prefix_first() -> None:
    for policy, expected in (("fifo", [1, 2]), ("lpm", [2, 1])):
        driver = Driver(engine("sglang", max_num_seqs=1, sglang=SglangRules(schedule_policy=policy)))  # type: ignore[arg-type]
        driver.send_request(prompt(16), 2)
        driver.run()
        other, known = driver.send_request(prompt(16, 900), 2), driver.send_request(prompt(16), 2)
        driver.run()
        order = sorted([(other.first_token_ms, 1), (known.first_token_ms, 2)])
        assert [number for _, number in order] == expected


def test_evicted_device_blocks_are_onboarded_from_the_host_tier() -> None:
    host = HostRules(64, 1_000_000, to_host_gbps=10.0, to_device_gbps=0.5)
    driver = Driver(engine("vllm", num_blocks=8, host=host))
    driver.send_request(prompt(24), 2)
    driver.run()
    driver.send_request(prompt(28, 500), 2)
    driver.run()
    assert len(driver.host) >= 12
    before = driver.now_ms
    again = driver.send_request(prompt(24), 2)
    driver.run()
    assert again.cached_tokens == 20
    assert driver.machine.host is not None
    copied = driver.machine.host.onboarded
    assert copied > 0
    assert again.first_token_ms - before > copied * 2.0, "a block takes two milliseconds"


def test_transfer_and_copy_times_follow_bytes_and_bandwidth() -> None:
    assert TransferRules(1_000_000, 10.0).transfer_ms(1000) == pytest.approx(100.0)
    assert TransferRules(1_000_000, 0.0).transfer_ms(1000) == 0.0
    assert HostRules(1, 32_000_000).to_host_ms() == pytest.approx(1.0)
    assert HostRules(1, 1, 0.0, 0.0).to_device_ms() == 0.0
