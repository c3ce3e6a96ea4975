"""Determinism: replaces every source of nondeterminism of a run by values drawn from its seed.

Production code is not changed for it: clock, entropy and the order of sets are patched.
"""

import contextlib
import gc
import logging
import os
import random
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSet
from typing import Any, TypeVar
from unittest import mock

from tests.simulation.loop import SimLoop

import dynamo.backend.admission
import dynamo.backend.card
import dynamo.backend.worker
import dynamo.core.tasks
import dynamo.runtime.discovery.base
import dynamo.runtime.discovery.memory
import dynamo.runtime.push_router
import dynamo.runtime.request_plane.memory
import dynamo.runtime.request_plane.tcp.plane
import dynamo.runtime.request_plane.tcp.upstream_caller
import dynamo.runtime.request_plane.tcp.upstream_worker
import dynamo.serving.models
import dynamo.serving.open_requests
import dynamo.serving.pipeline
import dynamo.serving.served_model

T = TypeVar("T")


class OrderedSet(MutableSet[T]):
    """Set that is iterated in insertion order."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T) -> None:
        self._items[item] = None

    def discard(self, item: T) -> None:
        self._items.pop(item, None)


class OrderedWeakSet(MutableSet[T]):
    """Ordered set with weak references."""

    def __init__(self) -> None:
        self._items: weakref.WeakKeyDictionary[T, None] = weakref.WeakKeyDictionary()

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T) -> None:
        self._items[item] = None

    def discard(self, item: T) -> None:
        self._items.pop(item, None)


SETS = (
    dynamo.backend.admission,
    dynamo.core.tasks,
    dynamo.serving.models,
    dynamo.serving.served_model,
    dynamo.serving.open_requests,
    dynamo.serving.pipeline,
    dynamo.runtime.request_plane.memory,
    dynamo.runtime.request_plane.tcp.plane,
    dynamo.runtime.request_plane.tcp.upstream_caller,
    dynamo.runtime.request_plane.tcp.upstream_worker,
)
"""Modules that iterate over sets of objects."""
WEAK_SETS = (dynamo.runtime.discovery.base, dynamo.runtime.discovery.memory)

_real_load = dynamo.serving.served_model.load
_real_make_card = dynamo.backend.card.make_card
_real_urandom = os.urandom
_loaded: dict[str, Any] = {}
_cards: dict[str, Any] = {}


def load_once(card: Any, *sources: Any) -> Any:
    """Cache a card's preprocessor, a pure function of its files, across seeds."""
    key = dynamo.serving.models.mdc_sum(card)
    if key not in _loaded:
        with _own_entropy():
            _loaded[key] = _real_load(card, *sources)
    return _loaded[key]


def make_card_once(options: Any, config: Any) -> Any:
    """Cache a worker's card across seeds."""
    key = repr((options, config))
    if key not in _cards:
        with _own_entropy():
            _cards[key] = _real_make_card(options, config)
    return _cards[key]


@contextlib.contextmanager
def _own_entropy() -> Iterator[None]:
    """Let what only the first seed of a process does use no entropy of that seed."""
    before = random.getstate()
    with mock.patch.object(os, "urandom", _real_urandom):
        yield
    random.setstate(before)


class LogKeeper(logging.Handler):
    """Log handler that adds warnings and errors of production code to the event log."""

    def __init__(self, keep: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        self._keep(record)


@contextlib.contextmanager
def determinism(loop: SimLoop, seed: int, keep: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Patch clock, entropy and sets, so that only the seed determines a run."""
    entropy = random.Random(f"entropy {seed}")
    seeded_random = types.SimpleNamespace(Random=lambda _seed=None: random.Random(entropy.random()))
    before = random.getstate()
    logger = logging.getLogger("dynamo")
    level, propagate = logger.level, logger.propagate
    keeper = LogKeeper(keep)
    with contextlib.ExitStack() as stack:
        if (
            gc.isenabled()
        ):  # A collection ends generators and tasks that are in a cycle, at a time that no seed determines.
            gc.disable()
            stack.callback(gc.enable)
        stack.callback(random.setstate, before)
        patch = stack.enter_context
        random.seed(entropy.random())
        patch(mock.patch.object(os, "urandom", entropy.randbytes))
        for name in ("monotonic", "perf_counter", "thread_time"):
            patch(mock.patch.object(time, name, loop.time))
        patch(mock.patch.object(time, "time", loop.wall))
        patch(mock.patch.object(time, "time_ns", loop.wall_ns))
        patch(mock.patch.object(dynamo.runtime.push_router, "random", seeded_random))
        patch(mock.patch.object(dynamo.serving.served_model, "load", load_once))
        patch(mock.patch.object(dynamo.backend.worker, "make_card", make_card_once))
        for module in SETS:
            patch(mock.patch.object(module, "set", OrderedSet, create=True))
        for module in WEAK_SETS:
            patch(mock.patch.object(module, "weakref", types.SimpleNamespace(WeakSet=OrderedWeakSet)))
        logger.addHandler(keeper)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        stack.callback(logger.removeHandler, keeper)
        stack.callback(logger.setLevel, level)
        stack.callback(setattr, logger, "propagate", propagate)
        yield
