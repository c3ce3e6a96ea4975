"""OnceLock: a value that is created once, by whichever thread comes first."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OnceLock(Generic[T]):
    """Holder of a value, which is not None once it is set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[T] = []

    def get(self) -> T | None:
        """Return the value; None before it is set."""
        return next(iter(self._values), None)

    def get_or_init(self, initializer: Callable[[], T]) -> T:
        """Return the value, created by `initializer` if it is not set. An exception leaves it unset."""
        with self._lock:
            if not self._values:
                self._values.append(initializer())
            return self._values[0]
