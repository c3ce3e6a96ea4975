"""Topic: subscription to and publication of one endpoint's messages of one kind."""

from collections.abc import Callable

from dynamo.core.tasks import TaskOwner
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, Publisher, PublisherGone, Subscriber


class Topic:
    """A topic's subscriber and publisher, from `start` to `close`. Exceptions of handlers restart the subscription."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: EndpointId,
        name: str,
        on_message: Callable[[Event], None],
        gone: Callable[[int], None] | None = None,
    ) -> None:
        """`gone` is called with the id of a publisher that left."""
        self._runtime = runtime
        self._endpoint = endpoint
        self._name = name
        self._on_message = on_message
        self._gone = gone
        self._tasks = TaskOwner(f"{name} of {endpoint}")
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self.messages = 0
        """Number of received messages."""
        self.missed = 0
        """Number of messages that were lost on the way."""
        self._senders: set[int] = set()

    @property
    def senders(self) -> int:
        """Return the number of present publishers from which messages arrived."""
        return len(self._senders)

    @property
    def is_sound(self) -> bool:
        """False while the subscription is interrupted."""
        return self._tasks.is_sound

    async def start(self, *, publishes: bool) -> None:
        """Subscribe, and register as a publisher if `publishes`."""
        plane = self._runtime.event_plane
        self._subscriber = await plane.subscriber(self._endpoint, self._name)
        if publishes:
            self._publisher = await plane.publisher(self._endpoint, self._name)
        self._tasks.supervise(self._listen, "events")

    async def close(self) -> None:
        """Unsubscribe and leave the registry."""
        await self._tasks.cancel_and_wait()
        for end in (self._subscriber, self._publisher):
            if end is not None:
                await end.close()

    def publish(self, payload: bytes) -> bool:
        """Publish a message to all subscribers. Return False before the publisher is ready."""
        if self._publisher is None:
            return False
        self._publisher.publish(payload)
        return True

    async def _listen(self) -> None:
        assert self._subscriber is not None, "the subscriber is created by `start`"
        async for received in self._subscriber:
            if isinstance(received, Event):
                self.messages += 1
                self.missed += received.missed
                self._senders.add(received.publisher_id)
                self._on_message(received)
            elif isinstance(received, PublisherGone):
                self._senders.discard(received.publisher_id)
                if self._gone is not None:
                    self._gone(received.publisher_id)
