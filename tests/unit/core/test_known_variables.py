"""Known variables: a misspelt one is reported with the closest known name."""

import re
from pathlib import Path

import pytest

from dynamo.core.known_variables import KNOWN, UPSTREAM_ONLY, WARNINGS_MAX, is_known, warnings


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("DYN_HTTP_PROT", "DYN_HTTP_PROT: unknown variable, ignored; did you mean DYN_HTTP_PORT?"),
        ("DYN_ROUTERMODE", "DYN_ROUTERMODE: unknown variable, ignored; did you mean DYN_ROUTER_MODE?"),
        ("DYN_QQQQ", "DYN_QQQQ: unknown variable, ignored"),
        ("DYN_STORE_KV", "DYN_STORE_KV: has no effect in this implementation"),
    ],
)
def test_unknown_variable_is_one_line_with_the_nearest_name(name: str, line: str) -> None:
    assert warnings({name, "DYN_LOG", "PATH", "DYNAMIC"}) == [line]


@pytest.mark.parametrize(
    "name",
    ["DYN_LOG", "DYN_FILE_KV", "DYN_SYSTEM_PORT", "DYN_SYSTEM_PORT2", "DYN_HTTP_SVC_CHAT_PATH", "DYN_METRICS_TTFT_MAX",
     "DYN_KVBM_DISK_CACHE_DIR", "DYN_REQUEST_TRACE_FILE_PATH", "DYN_AUDIT_OUTPUT_PATH", "DYN_ROUTER_LOAD_AWARE"],
)  # fmt: skip
def test_variables_that_are_read_are_listed_as_known(name: str) -> None:
    assert is_known(name)


def test_number_of_warnings_is_bounded() -> None:
    lines = warnings(f"DYN_QQQQ_{number}" for number in range(WARNINGS_MAX + 5))
    assert len(lines) == WARNINGS_MAX + 1
    assert lines[-1] == "5 more unknown DYN_ variables"


def test_child_of_dynamo_serve_does_not_repeat_the_warnings() -> None:
    assert warnings(["DYN_QQQQ", "DYN_SERVE_CHILD"]) == []


def test_variables_that_are_read_are_not_listed_as_without_effect() -> None:
    assert KNOWN.isdisjoint(UPSTREAM_ONLY)


def test_documented_variables_are_known() -> None:
    root = Path(__file__).parents[3]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "examples").rglob("*.sh")]
    named = {name for path in pages for name in re.findall(r"\bDYN_[A-Z0-9_]+[A-Z0-9]\b(?!_)", path.read_text())}
    composed = {
        "DYN_HTTP_SVC_X_PATH",
        "DYN_METRICS_TTFT",
        "DYN_TCP_TLS",
        "DYN_HTP_PORT",
    }  # The last is an example of a mistake.
    assert {name for name in named if not is_known(name)} - UPSTREAM_ONLY - composed == set()
