"""Grammar compiler: one compilation for all requests, in a thread, with bounded waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.errors import DynamoException, InvalidArgument, Unknown, WorkerOverloaded
from dynamo.core.metrics import MetricsRegistry
from dynamo.cpu.compiler import KEPT_BYTES_MAX, THREADS_MAX, TRIALS_MAX, Compiler, CompilerMetrics
from dynamo.cpu.guided import Grammars, Guide
from dynamo.protocols.engine import GuidedDecoding

TIMEOUT_S = 20.0


class Held(Grammars):
    """Grammars whose compilation blocks until it is released."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 96)
        self.may_go = threading.Event()
        self.begun = 0

    def compile(
        self, guided: GuidedDecoding, key: bytes, thoughts_end: str | None = None, *, is_kept: bool = True
    ) -> Guide:
        self.begun += 1
        assert self.may_go.wait(TIMEOUT_S)
        if guided.regex == "breaks":
            raise ZeroDivisionError
        return super().compile(guided, key, thoughts_end, is_kept=is_kept)


class Trials:
    """Trials with scripted outcomes, by pattern."""

    def __init__(self, outcomes: dict[str, int | Exception]) -> None:
        self.outcomes = outcomes
        self.measured: list[GuidedDecoding] = []
        self.is_closed = False

    def measure(self, guided: GuidedDecoding, thoughts_end: str | None, timeout_s: float) -> int:
        self.measured.append(guided)
        outcome = self.outcomes.get(guided.regex or "", 1000)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self.is_closed = True


class GrammarRequester:
    """Requester of a grammar."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Guide | DynamoException] = asyncio.get_running_loop().create_future()

    def __call__(self, outcome: Guide | DynamoException) -> None:
        self.outcome.set_result(outcome)

    async def await_grammar(self) -> Guide | DynamoException:
        return await asyncio.wait_for(self.outcome, TIMEOUT_S)


@pytest.fixture
async def make(letters_model: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[tuple[Compiler, Held]] = []

    def build(
        *, timeout_s: float = TIMEOUT_S, is_held: bool = False, trials: Trials | None = None
    ) -> tuple[Compiler, Held, MetricsRegistry]:
        registry = MetricsRegistry()
        grammars = Held(str(letters_model))
        if not is_held:
            grammars.may_go.set()
        compiler = Compiler(grammars, CompilerMetrics(registry, "tiny"), trials or Trials({}), timeout_s=timeout_s)
        made.append((compiler, grammars))
        return compiler, grammars, registry

    yield build
    for compiler, grammars in made:
        grammars.may_go.set()
        await compiler.close()


def want(compiler: Compiler, pattern: str) -> GrammarRequester:
    requester = GrammarRequester()
    compiler.request_guide(GuidedDecoding(regex=pattern), None, requester)
    return requester


async def test_grammar_compiler_caches_compiled_grammars(make: Callable[..., Any]) -> None:
    compiler, grammars, registry = make()
    assert isinstance(await want(compiler, "a").await_grammar(), Guide)
    again = want(compiler, "a")
    assert again.outcome.done()
    assert grammars.begun == 1
    text = registry.render()
    assert 'dynamo_component_guided_grammar_lookups_total{model="tiny",outcome="kept"} 1' in text
    assert 'dynamo_component_guided_grammar_lookups_total{model="tiny",outcome="compiled"} 1' in text
    assert 'dynamo_component_guided_grammars{model="tiny"} 1' in text
    assert 'dynamo_component_guided_grammar_compile_seconds_count{model="tiny"} 1' in text


async def test_grammar_compiler_answers_all_waiting_requests(make: Callable[..., Any]) -> None:
    compiler, grammars, _ = make(is_held=True)
    several = [want(compiler, "a") for _ in range(5)]
    grammars.may_go.set()
    assert all([isinstance(await one.await_grammar(), Guide) for one in several])
    assert grammars.begun == 1


async def test_grammar_compiler_reports_an_invalid_grammar(make: Callable[..., Any]) -> None:
    compiler, _, registry = make()
    assert isinstance(await want(compiler, "(").await_grammar(), InvalidArgument)
    assert 'lookups_total{model="tiny",outcome="refused"} 1' in registry.render()


async def test_grammar_compiler_reports_a_library_failure_to_its_request_only(make: Callable[..., Any]) -> None:
    compiler, _, _ = make()
    assert isinstance(await want(compiler, "breaks").await_grammar(), Unknown)
    assert isinstance(await want(compiler, "a").await_grammar(), Guide)


async def test_grammar_compiler_times_out_while_others_wait(make: Callable[..., Any]) -> None:
    compiler, grammars, _ = make(timeout_s=0.05, is_held=True)
    slow = [want(compiler, str(number)) for number in range(THREADS_MAX)]
    for one in slow:
        error = await one.await_grammar()
        assert isinstance(error, InvalidArgument)
        assert "compilation took longer than" in str(error)
    late = await want(compiler, "a").await_grammar()
    assert isinstance(late, WorkerOverloaded)
    assert grammars.begun == THREADS_MAX


async def test_grammar_compiler_sends_nothing_after_close(make: Callable[..., Any]) -> None:
    compiler, grammars, _ = make(is_held=True)
    requester = want(compiler, "a")
    await compiler.close()
    grammars.may_go.set()
    assert not requester.outcome.done()


async def test_grammar_that_fails_its_trial_compilation_is_not_compiled(make: Callable[..., Any]) -> None:
    trials = Trials({"a": InvalidArgument("it was not compiled within 10 s"), "b": WorkerOverloaded("busy")})
    compiler, grammars, registry = make(trials=trials)
    assert isinstance(await want(compiler, "a").await_grammar(), InvalidArgument)
    assert isinstance(await want(compiler, "b").await_grammar(), WorkerOverloaded)
    assert grammars.begun == 0
    assert 'lookups_total{model="tiny",outcome="refused"} 2' in registry.render()
    await compiler.close()
    assert trials.is_closed


async def test_large_grammar_is_not_cached(make: Callable[..., Any]) -> None:
    compiler, grammars, _ = make(trials=Trials({"a": KEPT_BYTES_MAX + 1}))
    for _ in range(2):
        assert isinstance(await want(compiler, "a").await_grammar(), Guide)
    assert (grammars.begun, len(grammars)) == (2, 0)


async def test_simple_schema_is_compiled_without_a_trial(make: Callable[..., Any]) -> None:
    trials = Trials({})
    compiler, _, _ = make(trials=trials)
    for guided in (GuidedDecoding(json={"type": "object"}), GuidedDecoding(choice=["a", "b"])):
        requester = GrammarRequester()
        compiler.request_guide(guided, None, requester)
        assert isinstance(await requester.await_grammar(), Guide)
    assert not trials.measured


async def test_number_of_trial_compilations_is_bounded(make: Callable[..., Any]) -> None:
    may_go = threading.Event()

    class Slow(Trials):
        def measure(self, guided: GuidedDecoding, thoughts_end: str | None, timeout_s: float) -> int:
            assert may_go.wait(TIMEOUT_S)
            return super().measure(guided, thoughts_end, timeout_s)

    compiler, _, _ = make(trials=Slow({}))
    slow = [want(compiler, f"a{{{number + 1}}}") for number in range(TRIALS_MAX)]
    await turns()
    assert isinstance(await want(compiler, "b").await_grammar(), WorkerOverloaded)
    may_go.set()
    assert all([isinstance(await one.await_grammar(), Guide) for one in slow])
