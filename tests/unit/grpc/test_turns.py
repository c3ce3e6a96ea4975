"""Turns: calls that go on in one iteration of the loop."""

import asyncio
from collections import Counter

from tests.settle import turns
from tests.unit.grpc.kserve_stack import open_kserve_stack, text_request

from dynamo.grpc.turns import CALLS_PER_TURN, CallTurns

CALLS = 50


class Iterations:
    """Number of the loop's present iteration."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._loop.call_soon(self._count)


async def test_at_most_so_many_calls_go_on_in_an_iteration_in_their_order() -> None:
    one, iterations = CallTurns(3), Iterations()
    passed: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await one.next()
        passed.append((number, iterations.number))

    await asyncio.gather(*map(call, range(10)))
    assert [number for number, _ in passed] == list(range(10))
    assert max(Counter(at for _, at in passed).values()) == 3


async def test_a_call_alone_does_not_wait() -> None:
    one = CallTurns(1)
    for _ in range(3):
        await asyncio.wait_for(one.next(), None)
        await turns(2)
    waiting = one.next()
    try:
        waiting.send(None)
    except StopIteration:
        pass
    else:
        raise AssertionError("the call waits")


async def test_a_cancelled_call_takes_no_turn() -> None:
    one = CallTurns(1)
    _, first, second = [asyncio.ensure_future(one.next()) for _ in range(3)]
    await turns()
    assert not (first.done() or second.done())
    first.cancel()
    await second
    assert first.cancelled()


class CallContext:
    """A call of gRPC without headers."""

    @staticmethod
    def invocation_metadata() -> None:
        return None


async def test_requests_that_arrive_at_once_are_started_in_several_iterations() -> None:
    async with open_kserve_stack() as stack:
        answer = stack.service._unary("ModelInferRequest", stack.service.model_infer)
        iterations, started, ended = Iterations(), list[int](), list[int]()
        handle = stack.pipeline.handle_call

        def counted(call: object) -> None:
            started.append(iterations.number)
            handle(call)  # type: ignore[arg-type]

        stack.service._calls._pipeline.handle_call = counted  # type: ignore[method-assign, assignment]
        data = text_request("a b").SerializeToString()

        async def request() -> None:
            await answer(data, CallContext())
            ended.append(iterations.number)

        await asyncio.gather(*[request() for _ in range(CALLS)])
        for seen in (started, ended):
            assert len(seen) == CALLS
            assert max(Counter(seen).values()) <= CALLS_PER_TURN
