"""A prefill worker's response is evaluated once, and its load is released once."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from tests.settle import until

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import Cancelled, Disconnected, ResponseTimeout, StreamIncomplete, Unknown
from dynamo.protocols.engine import EngineOutput, PrefillResult
from dynamo.runtime.request_plane.base import Item
from dynamo.serving import prefill_phase as prefill_request
from dynamo.serving.prefill_phase import ELEMENTS_MAX, PrefillPhase


class Router:
    """Router that counts prefills."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def a_phase_request(router: Router | None = None, *, has_other: bool = True) -> PrefillPhase:
    served: Any = SimpleNamespace(kv=router, routed=None, has_other=lambda _: has_other)
    served.current = served
    phase = PrefillPhase(served, "id", 7)
    if router is not None:
        decision: Any = SimpleNamespace(worker_id=7, dp_rank=1)
        phase.book(served, decision)
    return phase


def item(**fields: Any) -> Item:
    return Item(msgpack_encode(EngineOutput(fields.pop("token_ids", [5]), 0, **fields)))


async def test_prefill_result_is_passed_on_unchanged() -> None:
    for params in ({"at": 1}, "a text", {}, 0):
        phase = a_phase_request()
        phase.on_item(item(disaggregated_params=params, finish_reason="length"))
        phase.on_end()
        assert await phase.wait(1) == PrefillResult(params)
        assert not phase.is_whole
        assert phase.tokens == 1
        assert phase.done_s >= phase.sent_s


async def test_prefill_request_releases_its_router_slot_once() -> None:
    router = Router()
    phase = a_phase_request(router)
    assert (phase.instance_id, phase.dp_rank, phase.is_over) == (7, 1, False)
    phase.on_item(item(disaggregated_params={}))
    phase.on_end()
    phase.give_up()
    phase.release()
    assert router.released == ["id"]
    assert phase.is_over


async def test_prefill_request_failure_reaches_its_callback_once_and_its_waiter() -> None:
    phase = a_phase_request()
    received: list[Any] = []
    phase.on_failure = received.append
    error = Disconnected("gone")
    phase.on_error(error)
    phase.on_error(Disconnected("again"))
    assert received == [error]
    with pytest.raises(Disconnected, match="gone"):
        await phase.wait(1)


class Call:
    """A request to a worker, as its caller holds it."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.instance_id = 7

    def stop(self) -> None:
        self.words.append("stop")

    def kill(self) -> None:
        self.words.append("kill")


async def test_prefill_that_has_ended_does_not_refer_to_its_call_which_refers_to_it() -> None:
    phase, call = a_phase_request(), Call()
    phase.sent(call)
    assert call in gc.get_referents(phase)
    phase.on_item(item(disaggregated_params={}))
    phase.on_end()
    assert call not in gc.get_referents(phase)
    assert await phase.wait(1) == PrefillResult({})


async def test_abandoned_prefill_is_stopped_and_released_at_its_end() -> None:
    router, call = Router(), Call()
    phase = a_phase_request(router)
    phase.sent(call)
    phase.give_up()
    phase.give_up()
    assert (call.words, router.released) == (["stop"], [])
    phase.on_item(item(finish_reason="cancelled"))
    phase.on_end()
    assert router.released == ["id"]
    with pytest.raises(Cancelled):
        await phase.wait(1)


async def test_prefill_abandoned_before_the_send_is_stopped_after_the_send() -> None:
    phase, call = a_phase_request(Router()), Call()
    phase.give_up()
    phase.sent(call)
    assert call.words == ["stop"]


async def test_prefill_that_ignores_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_request, "STOP_S", 0.0)
    router, call = Router(), Call()
    phase = a_phase_request(router)
    phase.sent(call)
    phase.give_up()
    with pytest.raises(Cancelled, match="did not stop"):
        await phase.wait(30)
    assert (call.words, router.released) == (["stop", "kill"], ["id"])


async def test_abandoned_prefill_is_stopped_after_its_grace_period() -> None:
    router, call = Router(), Call()
    phase = a_phase_request(router)
    phase.sent(call)
    phase.give_up(after_s=0.001)
    assert (call.words, router.released) == ([], [])
    await until(lambda: call.words)
    phase.on_end()
    assert (call.words, router.released) == (["stop"], ["id"])


async def test_abandoned_prefill_leaves_a_silent_worker_without_an_alternative() -> None:
    phase = a_phase_request(has_other=False)
    phase.sent(Call())
    phase.give_up()
    assert phase.leaves_silent_worker()


async def test_abandoned_prefill_does_not_report_a_failure() -> None:
    phase = a_phase_request()
    received: list[Any] = []
    phase.on_failure = received.append
    phase.give_up()
    phase.on_error(Disconnected("gone"))
    assert received == []


async def test_prefill_without_a_valid_result_is_an_error() -> None:
    for elements, kind in (
        ([], StreamIncomplete),
        ([Item(b"\xc1")], Unknown),
        ([item(finish_reason="length")], Unknown),
        ([Item(None, event="x")], StreamIncomplete),
    ):
        phase = a_phase_request()
        for element in elements:
            phase.on_item(element)
        phase.on_end()
        with pytest.raises(kind):
            await phase.wait(1)


async def test_prefill_leaves_a_silent_worker_only_if_another_exists() -> None:
    assert a_phase_request().leaves_silent_worker()
    assert not a_phase_request(has_other=False).leaves_silent_worker()
    phase = a_phase_request()
    phase.on_error(Disconnected("gone"))
    assert not phase.leaves_silent_worker()


async def test_prefill_timeout_kills_the_call() -> None:
    phase, killed = a_phase_request(), []
    call: Any = SimpleNamespace(kill=lambda: killed.append(True))
    phase.call = call
    with pytest.raises(ResponseTimeout):
        await phase.wait(0.001)
    assert killed == [True]


async def test_prefill_request_replays_its_output_in_order_and_within_bounds() -> None:
    phase = a_phase_request()
    received: list[Any] = []
    phase.on_token(4)
    phase.on_item(item(finish_reason="stop"))
    for _ in range(2 * ELEMENTS_MAX):
        phase.on_token(9)
    phase.on_end()
    assert phase.is_whole
    receiver: Any = SimpleNamespace(
        on_token=received.append, on_item=lambda _: received.append("item"), on_end=lambda: received.append("end")
    )
    phase.replay_to(receiver)
    assert received[:3] == [4, "item", 9]
    assert received[-1] == "end"
    assert len(received) == ELEMENTS_MAX + 1
