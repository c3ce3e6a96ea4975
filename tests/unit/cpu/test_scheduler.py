from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.cpu.blocks import KvBlockPool
from dynamo.cpu.scheduler import Chunk, Scheduler
from dynamo.cpu.sequence import TokenSequence

BLOCK_TOKENS = 4


def scheduler(*, blocks: int = 64, sequences_max: int = 4, batched_tokens_max: int = 16) -> Scheduler:
    return Scheduler(KvBlockPool(blocks), sequences_max=sequences_max, batched_tokens_max=batched_tokens_max)


def sequence(length: int, first: int = 0) -> TokenSequence:
    return TokenSequence(range(first, first + length), BLOCK_TOKENS)


def step(machine: Scheduler) -> list[tuple[TokenSequence, int]]:
    """One step in which every sequence that can generate a token does."""
    chunks = machine.plan()
    speaking = [chunk.sequence for chunk in chunks if chunk.is_last]
    machine.advance(chunks)
    for who in speaking:
        who.tokens.append(1000 + len(who.tokens))
    machine.validate()
    return [(chunk.sequence, chunk.count) for chunk in chunks]


def test_scheduler_computes_a_long_prompt_in_chunks() -> None:
    machine, long = scheduler(), sequence(40)
    machine.add(long)
    assert [step(machine) for _ in range(4)] == [[(long, 16)], [(long, 16)], [(long, 8)], [(long, 1)]]


def test_scheduler_runs_decoding_requests_before_prompts() -> None:
    machine, first, long = scheduler(), sequence(3), sequence(40, first=100)
    machine.add(first)
    step(machine)
    machine.add(long)
    assert step(machine) == [(first, 1), (long, 15)]


def test_scheduler_batches_prompts_in_a_step() -> None:
    machine = scheduler()
    prompts = [sequence(5, first=10 * place) for place in range(4)]
    for prompt in prompts:
        machine.add(prompt)
    assert step(machine) == [(prompts[0], 5), (prompts[1], 5), (prompts[2], 5), (prompts[3], 1)]


def test_scheduler_limits_running_requests() -> None:
    machine = scheduler(sequences_max=2)
    for place in range(3):
        machine.add(sequence(2, first=10 * place))
    assert len(step(machine)) == 2
    assert (len(machine.running), len(machine.waiting)) == (2, 1)


def test_scheduler_computes_a_shared_prefix_once() -> None:
    machine, first, second = scheduler(), sequence(14), sequence(15)
    machine.add(first)
    step(machine)
    machine.add(second)
    assert step(machine) == [(first, 1), (second, 3)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert first.blocks[:3] == second.blocks[:3]


def test_scheduler_preempts_the_youngest_request_without_blocks() -> None:
    machine, old, young = scheduler(blocks=6, batched_tokens_max=32), sequence(8), sequence(8, first=100)
    machine.add(old)
    machine.add(young)
    output = 0
    while not machine.preemptions:
        step(machine)
        output += 1
        assert output < 20
    assert machine.running == [old]
    assert list(machine.waiting) == [young]
    assert young.tokens[8:], "what it said is kept"
    assert young.blocks == []


def test_scheduler_resumes_a_preempted_request_from_the_cache() -> None:
    machine, old, young = scheduler(blocks=6, batched_tokens_max=32), sequence(8), sequence(8, first=100)
    machine.add(old)
    machine.add(young)
    while not machine.preemptions:
        step(machine)
    machine.finish(old)
    ((_, count),) = step(machine)
    assert count < len(young.tokens) - 1
    assert young.cached_tokens == 0, "the caller is told what was cached when its request came"


def test_scheduler_does_not_start_a_request_that_would_be_preempted() -> None:
    machine, old, young = scheduler(blocks=5), sequence(8), sequence(12, first=100)
    machine.add(old)
    machine.add(young)
    step(machine)
    assert machine.running == [old]


def test_scheduler_followers_wait_for_their_leader_and_share_its_blocks() -> None:
    machine, leader = scheduler(batched_tokens_max=32), sequence(9)
    followers = [TokenSequence(range(9), BLOCK_TOKENS, leader=leader) for _ in range(2)]
    for who in (leader, *followers):
        machine.add(who)
    assert step(machine) == [(leader, 9)]
    assert step(machine) == [(leader, 1), (followers[0], 1), (followers[1], 1)]
    assert followers[0].blocks[:2] == leader.blocks[:2]


def test_scheduler_waiting_follower_does_not_block_other_requests() -> None:
    machine, leader, other = scheduler(batched_tokens_max=8), sequence(20), sequence(3, first=100)
    for who in (leader, TokenSequence(range(20), BLOCK_TOKENS, leader=leader), other):
        machine.add(who)
    for _ in range(3):
        done = step(machine)
    assert other in [who for who, _ in done]


def test_scheduler_removes_a_finished_request_from_any_position() -> None:
    machine, runs, waits = scheduler(sequences_max=1), sequence(3), sequence(3, first=100)
    machine.add(runs)
    machine.add(waits)
    step(machine)
    machine.finish(waits)
    machine.finish(runs)
    machine.finish(runs)
    assert not machine.has_work
    assert machine.pool.used == 0
    machine.validate()


class Schedule(RuleBasedStateMachine):
    """Invariants hold, the token budget is kept, and every request ends, for any order of arrivals, ends and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = scheduler(blocks=16, sequences_max=4, batched_tokens_max=12)
        self.lengths: dict[TokenSequence, int] = {}

    @rule(length=st.integers(1, 40), kind=st.integers(0, 2), says=st.integers(1, 23))
    def arrive(self, length: int, kind: int, says: int) -> None:
        who = sequence(length, first=100 * kind)
        self.lengths[who] = length + says  # At most 63 of the 64 slots.
        self.machine.add(who)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def follow(self, data: Any) -> None:
        leader = data.draw(st.sampled_from(list(self.lengths)))
        prompt = leader.tokens[: leader.prompt_tokens]
        who = TokenSequence(prompt, BLOCK_TOKENS, leader=leader)
        self.lengths[who] = len(prompt) + 5
        self.machine.add(who)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        who = data.draw(st.sampled_from(list(self.lengths)))
        self.end(who)

    @rule()
    def clear(self) -> None:
        self.machine.pool.clear()

    @rule(steps=st.integers(1, 6))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        had_work = self.machine.has_work
        before = {who: len(who.tokens) for who in self.lengths}
        chunks: list[Chunk] = self.machine.plan()
        assert bool(chunks) == had_work, "there was work, and none was planned"
        assert sum(chunk.count for chunk in chunks) <= 12
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.sequence.computed + chunk.count <= len(chunk.sequence.blocks) * BLOCK_TOKENS
        speaking = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.machine.advance(chunks)
        for who in speaking:
            assert len(who.tokens) == before[who]
            who.tokens.append(len(who.tokens) % 3)
            if len(who.tokens) >= self.lengths[who]:
                self.end(who)

    def end(self, who: TokenSequence) -> None:
        self.machine.finish(who)
        del self.lengths[who]

    @invariant()
    def is_whole(self) -> None:
        self.machine.validate()

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.machine.has_work:
                break
            self.one_step()
        assert not self.lengths, "someone never came to an end"
        assert self.machine.pool.used == 0


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
