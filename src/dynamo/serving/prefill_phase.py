"""PrefillLeg: the half of a request that a prefill worker does: who does it, and what comes of it.

It is the receiver of the prefill worker's answer: one token, and in `disaggregated_params` where the blocks lie.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import json_decoder, msgpack_decoder
from dynamo.core.errors import Cancelled, ResponseTimeout, StreamIncomplete, Unknown
from dynamo.kv_router.router import Decision
from dynamo.protocols.engine import BootstrapInfo, EngineOutput, PrefillDetails, PrefillResult, PreprocessedRequest
from dynamo.routing.prefill_plan import GOES_ON
from dynamo.runtime.request_plane.base import Call, Item, Receiver

if TYPE_CHECKING:
    from dynamo.routing.session_affinity import SessionAffinity
    from dynamo.serving.served_model import ServedModel

_decode = {"msgpack": msgpack_decoder(EngineOutput).decode, "json": json_decoder(EngineOutput).decode}

ELEMENTS_MAX = 64
"""Of an answer of one token; a worker that says more than that is not a prefill worker."""

STOP_S = 300.0
"""How long a prefill that was stopped may take to end: the longest prompt of an engine that cannot abort one."""


class PrefillLeg:
    """One attempt at a prefill. For the router of the prefill workers it is how far that is."""

    def __init__(self, served: "ServedModel", request_id: str, instance_id: int = 0, queue_depth: int = 0) -> None:
        self.served = served
        self.instance_id = instance_id
        self.decision: Decision | None = None
        """What the router of the prefill workers decided, where there is one."""
        self.queue_depth = queue_depth
        """How many waited for a prefill worker when it was chosen."""
        self.call: Call | None = None
        """The request to its worker; set by `sent`."""
        self.meeting: BootstrapInfo | None = None
        """Where both legs meet."""
        self.is_whole = False
        """Whether its token is all that the request gets."""
        self.sent_s = time.perf_counter()
        self.done_s = 0.0
        """When the prompt was computed; 0 before."""
        self.tokens = 0
        self.is_over = False
        """Whether its result is not wanted any more, or has come."""
        self.error: Exception | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        """Hears that it failed, where nobody waits for it."""
        self._request_id = request_id
        self._is_booked = False
        self._kept: SessionAffinity | None = None
        self._elements: list[int | Item] = []
        self._reason: str | None = None
        self._params: Any = None
        self._details: PrefillDetails | None = None
        self._done = asyncio.Event()
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None
        """Until it is stopped, or killed because it did not stop."""

    @property
    def is_done(self) -> bool:
        """Whether its worker's answer has ended."""
        return self._done.is_set()

    @property
    def dp_rank(self) -> int | None:
        """The rank that its router chose."""
        return None if self.decision is None else self.decision.dp_rank

    def book(self, served: "ServedModel", decision: Decision) -> None:
        """Its worker was chosen, and counts it."""
        self.served, self.decision, self.instance_id = served, decision, decision.worker_id
        self._is_booked = True

    def sent(self, call: Call) -> None:
        """Take over the request to its worker; one whose client left meanwhile is stopped."""
        self.call = call
        if self.is_over and not self.is_done:
            self._stop(call)

    def keep(self, sessions: "SessionAffinity | None", request: PreprocessedRequest) -> None:
        """Bind its worker to the request's session, where sessions stay with their workers."""
        if sessions is not None and sessions.sent(request, self._request_id, self.instance_id):
            self._kept = sessions
        if self.is_done:
            self.release()

    async def wait(self, timeout_s: float) -> PrefillResult:
        """What decode goes on with; `is_whole` says that it does not. Raises what the worker answered."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            self.on_failure = None
            self._kill(ResponseTimeout(f"the prefill worker did not answer within {timeout_s:g} s"))
        if self.error is not None:
            raise self.error
        return PrefillResult(self._params, self._details)

    def give_up(self, after_s: float = 0.0) -> None:
        """Stop a prefill whose result is not wanted; the routers count it until its worker has released it.

        One that still waits in its router's queue leaves it; one that is being sent is stopped by `sent`. `after_s` is
        how long it may take to end by itself.
        """
        self.on_failure = None
        self.is_over = True
        if self.is_done:
            self.release()
        elif self.call is not None and after_s > 0:
            self._later(after_s, self._stop, self.call)
        elif self.call is not None:
            self._stop(self.call)

    def _stop(self, call: Call) -> None:
        """Ask the worker to end it; its answer ends then, and so do the sessions and bookings it holds."""
        if not self._is_stopped:
            self._is_stopped = True
            self._later(STOP_S, self._kill, Cancelled("the prefill worker did not stop"))
            call.stop()

    def _later(self, after_s: float, act: Callable[[Any], None], about: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(after_s, act, about)

    def _kill(self, error: Exception) -> None:
        """End it without waiting for the worker."""
        if self.call is not None and not self.is_done:
            self.call.kill()
        self._end(error)

    def release(self) -> None:
        """Release its booking in the prefill workers' router, and its session."""
        self.is_over = True
        if self._is_booked and self.served.kv is not None:
            self.served.kv.release(self._request_id)
        self._is_booked = False
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.finish(self._request_id)

    def tell(self, receiver: Receiver) -> None:
        """Says to somebody else what the worker said: its answer is the request's."""
        for element in self._elements:
            if isinstance(element, int):
                receiver.on_token(element)
            else:
                receiver.on_item(element)
        receiver.on_end()

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        self._hear(token_id)
        self.tokens += 1

    def on_item(self, item: Item) -> None:
        if item.data is None or self._done.is_set():
            return
        try:
            output = _decode[item.codec](item.data)
        except ValueError as error:
            self._end(Unknown(f"the prefill worker's output cannot be read: {error}"))
            return
        self._hear(item)
        self.tokens += len(output.token_ids)
        if output.disaggregated_params is not None:
            self._params = output.disaggregated_params
        usage = output.completion_usage
        if usage is not None and usage.prompt_tokens_details is not None:
            self._details = PrefillDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens)
        if output.finish_reason is not None:
            self._reason = output.finish_reason

    def on_end(self) -> None:
        self._end(self._judged())

    def on_error(self, error: Exception) -> None:
        self._end(error)

    def leaves_silent_worker(self) -> bool:
        """Worker is unresponsive: leave it if another instance is available, or the result is not wanted."""
        if self.is_done:
            return False
        return self.is_over or self.served.current.has_other(frozenset((self.instance_id,)))

    def _hear(self, element: int | Item) -> None:
        if len(self._elements) < ELEMENTS_MAX:
            self._elements.append(element)

    def _judged(self) -> Exception | None:
        """Whether decode can go on from it."""
        reason = self._reason
        if reason is not None and reason.startswith("error"):
            return Unknown(reason.removeprefix("error:").strip() or "the prefill worker failed")
        if reason == "cancelled":
            return Cancelled("the prefill worker cancelled the request")
        if not self._elements:
            return StreamIncomplete("the prefill worker ended its stream without an answer")
        self.is_whole = reason not in GOES_ON
        if self._params is None and not self.is_whole and self.meeting is None:
            return Unknown("the prefill worker's answer has no disaggregated_params")
        return None

    def _end(self, error: Exception | None) -> None:
        if self._done.is_set():
            return
        self.error = error
        self.done_s = time.perf_counter()
        self._done.set()
        if self._timer is not None:
            self._timer.cancel()
        self.release()
        told, self.on_failure = self.on_failure, None
        if error is not None and told is not None:
            told(error)
