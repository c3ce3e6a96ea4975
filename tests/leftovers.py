"""Plugin that releases the resources that a failed test has left open with that test, instead of during a later one.

A test that fails before it has closed its sockets leaves them to the garbage collector, which reports each as an
unclosed resource. Every warning is an error, so that the test that runs at that time would fail as well, for no fault
of its own.
"""

import gc
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest

FAILURES = pytest.StashKey[list[TracebackType]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    """Keep the traceback of a failure: its frames hold the variables of the test."""
    report = yield
    if call.excinfo is not None and report.failed:
        item.stash.setdefault(FAILURES, []).append(call.excinfo.tb)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Release the variables after the teardown of a failed test."""
    result = yield
    if failures := item.stash.get(FAILURES, None):
        with unreported():
            while failures:
                traceback.clear_frames(failures.pop())
            # pytest sets these for debuggers; they hold the last exception until the next one.
            for name in ("last_exc", "last_value", "last_traceback", "last_type"):
                vars(sys).pop(name, None)
            gc.collect()
    return result


@contextmanager
def unreported() -> Iterator[None]:
    """Ignore what finalizers warn of and raise."""

    def ignore(unraisable: Any) -> None:
        pass

    hook, sys.unraisablehook = sys.unraisablehook, ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
