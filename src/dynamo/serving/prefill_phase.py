"""Prefill phase: one attempt to compute a request's prompt on a prefill worker, and its result.

`PrefillPhase` receives the prefill worker's output: one token, and the location of the KV blocks in `disaggregated_params`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynamo.core.codec import json_decoder, msgpack_decoder
from dynamo.core.errors import Cancelled, ResponseTimeout, StreamIncomplete, Unknown
from dynamo.protocols.engine import BootstrapInfo, EngineOutput, PrefillDetails, PrefillResult, PreprocessedRequest
from dynamo.routing.prefill_plan import GOES_ON
from dynamo.runtime.request_plane.base import Call, Item, Receiver

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision
    from dynamo.routing.session_affinity import SessionAffinity
    from dynamo.serving.served_model import ServedModel

_decode = {"msgpack": msgpack_decoder(EngineOutput).decode, "json": json_decoder(EngineOutput).decode}

ELEMENTS_MAX = 64
"""Maximum number of output elements; a prefill worker generates one token, so more is an error."""

STOP_S = 300.0
"""Time in seconds for a stopped prefill to end: the longest prompt of an engine that cannot abort one."""


class PrefillPhase:
    """One attempt at a prefill; also its progress, for the router of the prefill workers."""

    def __init__(
        self,
        served: "ServedModel",
        request_id: str,
        instance_id: int = 0,
        queue_depth: int = 0,
        *,
        dp_rank: int | None = None,
    ) -> None:
        """`dp_rank`: the rank without a KV router; None leaves it to the worker."""
        self.served = served
        self._rank = dp_rank
        self.instance_id = instance_id
        self.decision: Decision | None = None
        """Decision of the prefill workers' KV router, if there is one."""
        self.queue_depth = queue_depth
        """Number of requests queued for prefill workers when the worker was chosen."""
        self.call: Call | None = None
        """Request to the worker; set by `sent`."""
        self.meeting: BootstrapInfo | None = None
        """Address at which the decode worker fetches the blocks, if known in advance."""
        self.is_whole = False
        """Whether the request is complete after this token."""
        self.sent_s = time.perf_counter()
        self.done_s = 0.0
        """Time at which the prompt was computed; 0 before."""
        self.tokens = 0
        self.is_over = False
        """Whether the result has arrived or is no longer needed."""
        self.error: Exception | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        """Called on failure if no `wait` is in progress."""
        self._request_id = request_id
        self._is_booked = False
        self._kept: SessionAffinity | None = None
        self._elements: list[int | Item] = []
        self._reason: str | None = None
        self._params: Any = None
        self._details: PrefillDetails | None = None
        self._done = asyncio.Event()
        self._known = asyncio.Event()
        """Set once a decode phase may be sent: with parameters in advance, or at the end."""
        self._is_stopped = False
        self._timer: asyncio.TimerHandle | None = None
        """Timer that stops the prefill, or kills it if it did not stop."""

    @property
    def is_done(self) -> bool:
        """Whether the worker's response has ended."""
        return self._done.is_set()

    @property
    def dp_rank(self) -> int | None:
        """Rank chosen by the router."""
        return self._rank if self.decision is None else self.decision.dp_rank

    def book(self, served: "ServedModel", decision: "Decision") -> None:
        """Record the chosen worker, whose router counts the request."""
        self.served, self.decision, self.instance_id = served, decision, decision.worker_id
        self._is_booked = True

    def meet(self, meeting: BootstrapInfo | None) -> None:
        """Set the address at which the decode worker fetches the blocks, if known in advance."""
        self.meeting = meeting

    def report_failure(self, notify: Callable[[Exception], None] | None) -> None:
        """Call `notify` if the prefill fails while no `wait` is in progress."""
        self.on_failure = notify

    def sent(self, call: Call) -> None:
        """Attach the request to its worker; stop it if it was cancelled meanwhile."""
        self.call = call
        if self.is_over and not self.is_done:
            self._stop(call)

    def keep(self, sessions: "SessionAffinity | None", request: PreprocessedRequest) -> None:
        """Bind the request's session to the worker, if session affinity is enabled."""
        if sessions is not None and sessions.sent(request, self._request_id, self.instance_id):
            self._kept = sessions
        if self.is_done:
            self.release()

    async def wait(self, timeout_s: float) -> PrefillResult:
        """Return the result for the decode phase; with `is_whole` there is none. Raise the worker's error.

        SGLang's workers send the parameters in advance, and end once the decode worker has fetched the blocks: then the phase is not
        done yet.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._known.wait()
        except TimeoutError:
            self.on_failure = None
            self._kill(ResponseTimeout(f"the prefill worker did not respond within {timeout_s:g} s"))
        if self.error is not None:
            raise self.error
        return PrefillResult(self._params, self._details)

    def give_up(self, after_s: float = 0.0) -> None:
        """Stop a prefill whose result is not needed; the routers count it until its worker has released it.

        A prefill queued in its router leaves the queue; one that is being sent is stopped by `sent`. `after_s` is the time
        in seconds that it may take to end by itself.
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
        """Stop the request at the worker; its response then ends and releases its sessions and bookings."""
        if not self._is_stopped:
            self._is_stopped = True
            self._later(STOP_S, self._kill, Cancelled("the prefill worker did not stop"))
            call.stop()

    def _later(self, after_s: float, act: Callable[[Any], None], about: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(after_s, act, about)

    def _kill(self, error: Exception) -> None:
        """End the prefill without waiting for the worker."""
        if self.call is not None and not self.is_done:
            self.call.kill()
        self._end(error)

    def release(self) -> None:
        """Release the request in the prefill workers' router, and its session."""
        self.is_over = True
        if self._is_booked and self.served.kv is not None:
            self.served.kv.release(self._request_id)
        self._is_booked = False
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.finish(self._request_id)

    def replay_to(self, receiver: Receiver) -> None:
        """Pass the prefill worker's output to another receiver: it is the response of the request."""
        for element in self._elements:
            if isinstance(element, int):
                receiver.on_token(element)
            else:
                receiver.on_item(element)
        receiver.on_end()

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        self._keep_element(token_id)
        self.tokens += 1

    def on_item(self, item: Item) -> None:
        if item.data is None or self._done.is_set():
            return
        try:
            output = _decode[item.codec](item.data)
        except ValueError as error:
            self._end(Unknown(f"the prefill worker's output cannot be decoded: {error}"))
            return
        self._keep_element(item)
        self.tokens += len(output.token_ids)
        if output.disaggregated_params is not None:
            self._params = output.disaggregated_params
        usage = output.completion_usage
        if usage is not None and usage.prompt_tokens_details is not None:
            self._details = PrefillDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens)
        if output.finish_reason is not None:
            self._reason = output.finish_reason
        elif output.disaggregated_params is not None and not self.tokens:
            self._known.set()

    def on_end(self) -> None:
        self._end(self._judged())

    def on_error(self, error: Exception) -> None:
        self._end(error)

    def leaves_silent_worker(self) -> bool:
        """Worker is unresponsive: leave it if another instance is available, or the result is not wanted."""
        if self.is_done:
            return False
        return self.is_over or self.served.current.has_other(frozenset((self.instance_id,)))

    def _keep_element(self, element: int | Item) -> None:
        if len(self._elements) < ELEMENTS_MAX:
            self._elements.append(element)

    def _judged(self) -> Exception | None:
        """Return the error that prevents the decode phase, if any."""
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
        self._known.set()
        if self._timer is not None:
            self._timer.cancel()
        self.release()
        if self.call is not None and self.served.routed is not None:
            cached = 0 if self._details is None else self._details.cached_tokens or 0
            ttft_s = self.done_s - self.sent_s if error is None else None
            self.served.routed.ended(self.tokens, ttft_s, None, cached)
        self.call = None  # It refers to this receiver: in no cycle, both are freed at once.
        notify, self.on_failure = self.on_failure, None
        if error is not None and notify is not None:
            notify(error)
