"""Settings of the Python interpreter: while modules load, for servers, whose event loop must not pause, and for simulations."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo.core.deferred_modules import deferred

SWITCH_INTERVAL_S = 0.001
"""A thread that prepares a long prompt yields to the event loop after this time, not after 5 ms."""
THRESHOLDS = (20_000, 20, 100)
"""Objects, and collections of the younger generation, between two garbage collections."""
SIMULATION_THRESHOLDS = (200_000, 50, 100)
RARELY_USED = ("calendar", "html", "http.client", "locale", "logging.config", "msgspec.inspect", "shutil")
"""Modules that libraries import at their start and a command rarely uses; with their own imports they take three megabytes."""


def configure_interpreter() -> None:
    """Exempt the objects made at start-up from garbage collection, run it less often, and switch threads more often.

    A collection takes about 1 µs for each unreachable object. A request should leave none: reference counts free what is in no
    cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


@contextmanager
def paused_collections() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and exempt what they made from it.

    Nearly all objects of a module live as long as the process; collections would traverse them some hundred times, which takes
    a tenth to a fifth of a program's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def run_command(module: str) -> None:
    """Import the module of a command without garbage collections and without rarely used modules, run its `main`, and exit
    with its status.
    """
    with paused_collections(), deferred(RARELY_USED):
        main = importlib.import_module(module).main
        from dynamo.core.config import exit_on_config_error
    exit_on_config_error(main)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run garbage collection less often within this block, for code that leaves few reference cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*SIMULATION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
