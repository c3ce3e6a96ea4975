"""Orders: what the loop's thread tells the engine's, one after the other."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.cpu.generation import Fetch, Generation


@dataclass(frozen=True, slots=True)
class Add:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Drop:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Fetched:
    fetch: Fetch
    is_whole: bool


@dataclass(frozen=True, slots=True)
class FirstCame:
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class TakeBack:
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Call:
    """To be done between two steps."""

    work: Callable[[], None]
    done: "asyncio.Future[None]"

    def end(self, error: Exception | None) -> None:
        """Tells whoever waits for it. On the loop's thread."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Look:
    """Something changed in the tiers below the cache: it is to be told."""


class Stop:
    """Compute no more."""


Order = Add | Drop | Fetched | FirstCame | TakeBack | Call | Look | Stop
