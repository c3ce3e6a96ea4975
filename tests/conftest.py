"""What every test shares."""

import gc
import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

# A busy machine is slow; how long an example takes is no property of the code.
settings.register_profile("dynamo", deadline=None, max_examples=30)
# Continuous integration says the same of the same commit; everybody else draws new examples each time.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dynamo"))

# Envoy's definitions (Makefile): last, because the folder has parts of packages that are installed too.
sys.path.append(str(Path(sys.prefix) / "xds-protos"))

# A shell starts background commands with SIGINT ignored, and children inherit that: tests that interrupt need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # While tests are collected: nearly everything that is allocated then is kept.


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the modules and tests that exist now."""
    gc.collect()
    gc.freeze()
    gc.enable()
