"""Errand: a request of tokens that goes to workers as generations do, and whose answer somebody else hears.

A generation makes text of its answer; an errand hands it on. It goes to a decode worker by way of a prefill worker where
prompts are computed elsewhere, and to others while it has not been answered and one of them fails.
"""

from collections.abc import Mapping

from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.router import Decision
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Call, Item, Receiver
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.migration import Dispatch, MigrationPolicy
from dynamo.serving.prefill_phase import PrefillLeg
from dynamo.serving.prefill_router import dispatch_of
from dynamo.serving.served_model import ServedModel


class Errand:
    """One request. It is the receiver of what its worker says (see `generation.Sent`)."""

    def __init__(self, model: ServedModel, request: PreprocessedRequest, hearer: Receiver, tasks: TaskOwner) -> None:
        self.request = request
        self.tokens = 0
        """Elements so far: with the first of them it is answered."""
        self.heard: list[int] | None = None
        self.call: Call | None = None
        self.is_over = False
        self.failed_instance: int | None = None
        self.dispatch: Dispatch | None = None
        self._model = model
        self._hearer = hearer
        self._tasks = tasks

    async def send(
        self, request_id: str, headers: Mapping[str, str], metadata: Mapping[str, str], metrics: FrontendMetrics
    ) -> None:
        """Sends it. Raises what the last worker tried answered."""
        policy = MigrationPolicy()
        await dispatch_of(
            self._model, self, request_id, headers, metadata=metadata, policy=policy, metrics=metrics
        ).send()

    @property
    def decision(self) -> Decision | None:
        """What a KV router decided about it last."""
        return None if self.dispatch is None else self.dispatch.decision

    @property
    def prefill(self) -> PrefillLeg | None:
        """Who computed its prompt, where that was not who answers."""
        return None if self.dispatch is None else self.dispatch.prefill

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self.is_over:
            if self.call is not None:
                self.call.kill()
            self._finish()

    # The receiver's side of the request plane.

    def on_token(self, token_id: int) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self.tokens += 1
            self._hearer.on_token(token_id)

    def on_item(self, item: Item) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self.tokens += item.data is not None
            self._hearer.on_item(item)

    def on_end(self) -> None:
        """See `Receiver`."""
        if not self.is_over:
            self._finish()
            self._hearer.on_end()

    def on_error(self, error: Exception) -> None:
        """See `Receiver`: it is sent elsewhere if that may help."""
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
        """The worker stands still: better elsewhere than later, if there is an elsewhere."""
        return not self.is_over and self.dispatch is not None and self.dispatch.can_move()

    # What its dispatch tells it.

    def broke(self, error: Exception) -> None:
        """Nobody else can take it."""
        if not self.is_over:
            self._finish()
            self._hearer.on_error(error)

    def thinking_tokens(self) -> int:
        """Raise `AssertionError`: no forwarded request is resumed."""
        raise AssertionError("a forwarded request was resumed")

    def end_spent(self) -> None:
        """Never asked: nothing that was heard of it is replayed."""
        raise AssertionError("an errand was resumed")

    def _finish(self) -> None:
        self.is_over = True
        self.call = None
        if self.dispatch is not None:
            self.dispatch.release()
