"""Flags, their former names and variables have the same precedence in the released configuration classes and in ours."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.peers import require_peer

pytestmark = pytest.mark.conformance

PROBE = Path(__file__).with_name("peer_config_classes.py")
TIMEOUT_S = 300.0
REQUIRED = {"router": ["--endpoint", "a.b.c"]}
HTTP_NAMES = [
    f"{prefix}{name}" for prefix in ("DYN_HTTP_", "DYN_MM_HTTP_") for name in ("TIMEOUT", "READ_TIMEOUT", "CONCURRENCY")
]
OTHER_ERRORS = {"FileNotFoundError", "IsADirectoryError"}
"""Errors of a file that is not there: ours are one line that names the flag, as for every wrong value."""

Case = tuple[str, dict[str, str], list[str]]


def test_configuration_classes_agree_on_flags_and_variables() -> None:
    """Each variable alone, each name of each flag alone, with its variable, and two names in either order."""
    released = require_peer()
    listed = probed(released, "")
    cases = [case for group, flags in listed.items() for flag in flags for case in cases_of(group, flag)]
    cases += [("http", {one: "7", other: "9"}, []) for one, other in permutations(HTTP_NAMES, 2)]
    assert len(cases) > 1000
    text = json.dumps(cases)
    differing = [
        (case, theirs, ours)
        for case, theirs, ours in zip(cases, probed(released, text), probed(sys.executable, text), strict=True)
        if not agree(theirs, ours)
    ]
    assert not differing, f"{len(differing)} of {len(cases)} differ, first {differing[:3]}"


def cases_of(group: str, flag: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases of a flag."""
    required, variable, names = REQUIRED.get(group, []), flag["variable"], flag["names"]
    if flag["is_switch"]:
        words, values = [[name] for name in names], ("true", "0", "", "other")
    else:
        first, second = values_of(flag)
        words = [[f"{name}={second}"] for name in names]
        words += [[f"{one}={first}", f"{other}={second}"] for one, other in permutations(names, 2)]
        values = (first, "", "None", "-1")
    if variable:
        yield from ((group, {variable: value}, required) for value in values)
        yield from ((group, {variable: values[0]}, [*required, *given]) for given in words)
    yield from ((group, {}, [*required, *given]) for given in words)


def values_of(flag: dict[str, Any]) -> tuple[str, str]:
    """Return two values that a flag accepts."""
    if flag["choices"]:
        return flag["choices"][0], flag["choices"][-1]
    if "float" in flag["type"]:
        return "0.25", "0.5"
    return ("3", "5") if "int" in flag["type"] else ("one", "two")


def agree(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Return whether an `except` of the released error catches ours, or all released attributes are the same."""
    if "error" in theirs:
        return theirs["error"][0] in ours.get("error", ()) or ("error" in ours and theirs["error"][0] in OTHER_ERRORS)
    return theirs.items() <= ours.items()


def probed(python: str, text: str) -> Any:
    """Return what the probe prints."""
    done = subprocess.run(
        [python, PROBE], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd=PROBE.parent
    )
    return json.loads(done.stdout)
