"""Parent watch: ends a child of `dynamo serve` or `dynamo-run` when the parent ends for any reason.

The parent puts its process id into `DYN_SERVE_CHILD`. On Linux the kernel signals the parent's death; the parent
may have died before that was set up, so its id is compared once.
"""

import contextlib
import ctypes
import os
import signal
import sys

from dynamo.core.config import setting

VARIABLE = "DYN_SERVE_CHILD"

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Request SIGTERM for the death of the parent named by `DYN_SERVE_CHILD`; do nothing if the variable is not set."""
    parent = setting(VARIABLE, 0, int)
    if not parent:
        return
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
