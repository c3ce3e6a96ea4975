"""Orders: messages from the event loop's thread to the engine's thread, executed in order."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.cpu.generation import ActiveGeneration, Fetch


@dataclass(frozen=True, slots=True)
class Add:
    generation: ActiveGeneration


@dataclass(frozen=True, slots=True)
class Drop:
    generation: ActiveGeneration


@dataclass(frozen=True, slots=True)
class Fetched:
    fetch: Fetch
    is_whole: bool


@dataclass(frozen=True, slots=True)
class FirstTokenReceived:
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Function to be executed between two steps."""

    work: Callable[[], None]
    done: "asyncio.Future[None]"

    def end(self, error: Exception | None) -> None:
        """Complete the future of the caller. Runs on the loop's thread."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class TiersChanged:
    """Report a change in the tiers below the cache."""


class Stop:
    """Stop computing."""


Order = Add | Drop | Fetched | FirstTokenReceived | ReleaseExport | ControlCall | TiersChanged | Stop
