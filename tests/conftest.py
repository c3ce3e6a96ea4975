"""Configuration of pytest and hypothesis for all tests."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from tests import leftovers

# The duration of an example depends on the load of the machine, not on the code.
settings.register_profile("dynamo", deadline=None, max_examples=30)
# Continuous integration draws the same examples for the same commit; local runs draw new ones.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dynamo"))

# Envoy's definitions (Makefile): last, because the folder contains parts of packages that are also installed.
sys.path.append(str(Path(sys.prefix) / "xds-protos"))

# A shell starts background commands with SIGINT ignored, and children inherit that: tests that interrupt need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Add the plugin that keeps the failure of a test from failing others."""
    config.pluginmanager.register(leftovers)


gc.disable()  # Objects allocated during collection are kept almost all; collecting garbage then costs time only.


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the modules and tests that exist now."""
    gc.collect()
    gc.freeze()
    gc.enable()
