"""HeldRequests: requests in the routers' queues, with the maximum wait after which a router refuses them."""

from dataclasses import dataclass, field

from dynamo.replay.outcome import Flight


@dataclass(slots=True)
class HeldRequests:
    """Queued requests in the order in which they were queued."""

    timeout_ms: float
    _flights: dict[str, Flight] = field(init=False, default_factory=dict)
    is_timed: bool = field(init=False, default=False)
    """Whether the next timeout is scheduled; one at a time."""

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: str) -> bool:
        return key in self._flights

    def add(self, flight: Flight, now_ms: float) -> float | None:
        """Add a request; return the time of the timeout to be scheduled, if none is."""
        flight.held_ms = now_ms
        self._flights[flight.key] = flight
        if self.is_timed:
            return None
        self.is_timed = True
        return now_ms + self.timeout_ms

    def pop(self, key: str) -> Flight:
        """Remove and return a request."""
        return self._flights.pop(key)

    def expire(self, now_ms: float) -> tuple[list[Flight], float | None]:
        """Remove and return the requests that waited too long, and the time of the next timeout."""
        late: list[Flight] = []
        next_ms: float | None = None
        for flight in self._flights.values():
            if flight.held_ms + self.timeout_ms > now_ms:
                next_ms = flight.held_ms + self.timeout_ms
                break
            late.append(flight)
        for flight in late:
            del self._flights[flight.key]
        self.is_timed = next_ms is not None
        return late, next_ms
