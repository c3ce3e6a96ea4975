"""Extras: the command that installs the packages of an optional feature into the running environment."""

import os
import re
import shlex
import sys
from collections.abc import Sequence

DISTRIBUTION = "dynamo-serve"


def install_command(extra: str, *packages: str) -> str:
    """Return a shell command that installs an extra's packages, and further `packages`, for this interpreter.

    The command names the packages themselves: it works whether this package came from an index, a wheel or a clone.
    """
    wanted = [*(requirements(extra, _declared()) or [f"{DISTRIBUTION}[{extra}]"]), *packages]
    return shlex.join([interpreter(sys.executable, os.getcwd()), "-m", "pip", "install", *wanted])


def requirements(extra: str, declared: Sequence[str]) -> list[str]:
    """Return the requirements of an extra among a distribution's `Requires-Dist` lines, without their markers."""
    found = (re.fullmatch(r"(.+?)\s*;\s*extra == ['\"](.+)['\"]", line) for line in declared)
    return [match[1] for match in found if match and match[2] == extra]


def interpreter(executable: str, directory: str) -> str:
    """Return how to type the interpreter in `directory`: relative to it where that is shorter to read."""
    prefix = directory.rstrip("/") + "/"
    return executable.removeprefix(prefix) or "python3"


def _declared() -> Sequence[str]:
    from importlib import metadata  # 2 MB with the email package that it imports; only errors need it.

    try:
        return metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:  # Run from a source tree that is not installed.
        return ()
