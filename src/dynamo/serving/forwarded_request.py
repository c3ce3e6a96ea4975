"""Forwarded request: a token request sent to workers as a generation is, with its output passed to another receiver.

A generation turns output into text; a forwarded request passes it on. It takes a prefill phase and a decode phase if
another worker set computes prompts, and is retried on other workers if a worker fails before the first output.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynamo.core.tasks import TaskOwner
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Call, Item, Receiver
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.prefill_router import DisaggregatedDispatch
from dynamo.serving.served_model import ServedModel

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision


class ForwardedRequest:
    """One forwarded request; the receiver of its worker's output (see `generation.Sent`)."""

    def __init__(self, model: ServedModel, request: PreprocessedRequest, receiver: Receiver, tasks: TaskOwner) -> None:
        self.request = request
        self.tokens = 0
        """Output elements so far; after the first one the request is not retried."""
        self.received_ids: list[int] | None = None
        self.call: Call | None = None
        self.is_over = False
        self.failed_instance: int | None = None
        self.dispatch: Dispatch | None = None
        self._model = model
        self._receiver = receiver
        self._tasks = tasks

    async def send(
        self, request_id: str, headers: Mapping[str, str], metadata: Mapping[str, str], metrics: FrontendMetrics
    ) -> None:
        """Send the request. Raise the error of the last worker tried."""
        make = DisaggregatedDispatch if self._model.is_decode else Dispatch
        policy = MigrationPolicy()
        self.dispatch = make(self._model, self, request_id, headers, metadata=metadata, policy=policy, metrics=metrics)
        await self.dispatch.send()

    @property
    def decision(self) -> "Decision | None":
        """Return the latest decision of the KV router."""
        return None if self.dispatch is None else self.dispatch.decision

    @property
    def prefill(self) -> PrefillPhase | None:
        """Return the prefill phase, if the prompt was computed by another worker."""
        return None if self.dispatch is None else self.dispatch.prefill

    def cancel(self) -> None:
        """Cancel the request: its result is no longer needed."""
        if not self.is_over:
            if self.call is not None:
                self.call.kill()
            self._finish()

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self.tokens += 1
            self._receiver.on_token(token_id)

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self.tokens += item.data is not None
            self._receiver.on_item(item)

    def on_end(self) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self._finish()
            self._receiver.on_end()

    def on_error(self, error: Exception) -> None:
        """See `Receiver`: retry on another worker if the error allows it."""
        if self.is_over:
            return
        if self.call is not None:
            self.failed_instance = self.call.instance_id
            self.call.kill()
            self.call = None
        if self.dispatch is not None and self.dispatch.may_repeat(error):
            self._tasks.start(self.dispatch.repeat(error), "retry")
        else:
            self.broke(error)

    def leaves_silent_worker(self) -> bool:
        """Worker is unresponsive: migrate if another instance is available."""
        return not self.is_over and self.dispatch is not None and self.dispatch.can_move()

    # Callbacks of the dispatch.

    @property
    def can_start_over(self) -> bool:
        """Return False: its receiver has seen all output so far."""
        return False

    def start_over(self) -> None:
        """Raise `AssertionError`: its receiver has seen the output so far."""
        raise AssertionError("a forwarded request was started over")

    def broke(self, error: Exception) -> None:
        """End with the error: no other worker can take the request."""
        if not self.is_over:
            self._finish()
            self._receiver.on_error(error)

    def attach(self, call: Call) -> None:
        """Set the active request to a worker."""
        self.call = call

    def keep_ids(self) -> None:
        """Raise `AssertionError`: no forwarded request is resumed."""
        raise AssertionError("a forwarded request was resumed")

    def excuse_worker(self) -> None:
        """Do not blame the worker of the last failure, which another one caused."""
        self.failed_instance = None

    def thinking_tokens(self) -> int:
        """Raise `AssertionError`: no forwarded request is resumed."""
        raise AssertionError("a forwarded request was resumed")

    def end_spent(self) -> None:
        """Raise `AssertionError`: no forwarded request is resumed."""
        raise AssertionError("a forwarded request was resumed")

    def _finish(self) -> None:
        self.is_over = True
        self.call = None
        if self.dispatch is not None:
            self.dispatch.release()
