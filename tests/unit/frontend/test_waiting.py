"""Upstream's flags that are not honoured yet."""

from dataclasses import fields

import pytest

from dynamo.core.errors import ConfigError
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.waiting import WAITING, without_waiting

DECLARED = {field.metadata["flag"] for field in fields(FrontendConfig)}


def kept(*argv: str, **variables: str) -> list[str]:
    return without_waiting(argv, variables, {"--http-port"})


@pytest.mark.parametrize(
    "argv", [["--dyn-debug-perf"], ["--dyn-preprocess-workers", "5"], ["--exclude-tools-when-tool-choice-none=false"]]
)
def test_what_is_not_honoured_is_refused_by_name(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0].partition("=")[0]):
        kept(*argv)


def test_a_variable_is_refused_by_name_too() -> None:
    with pytest.raises(ConfigError, match="DYN_DEBUG_PERF=1: --dyn-debug-perf"):
        kept(DYN_DEBUG_PERF="1")


def test_what_asks_for_nothing_is_taken() -> None:
    argv = [
        "--http-port",
        "1",
        "--no-dyn-debug-perf",
        "--dyn-preprocess-workers",
        "0",
        "--dyn-chat-processor=dynamo",
        "--x",
    ]
    assert kept(*argv, DYN_DEBUG_PERF="false", DYN_PREPROCESS_WORKERS="0.0") == ["--http-port", "1", "--x"]


def test_a_flag_that_is_declared_waits_no_longer() -> None:
    assert without_waiting(["--dyn-debug-perf"], {}, {"--dyn-debug-perf"}) == ["--dyn-debug-perf"]


def test_a_flag_without_its_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dyn-chat-processor"):
        kept("--dyn-preprocess-workers", "0", "--dyn-chat-processor", "other")


@pytest.mark.parametrize("one", [one for one in WAITING if one.flag not in DECLARED], ids=lambda one: one.flag)
def test_every_one_of_them_is_refused_and_taken_with_its_default(one: object) -> None:
    flag, default = one.flag, one.default  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=flag):
        kept(f"{flag}={not default if isinstance(default, bool) else 'otherwise'}")
    assert kept(f"{flag}={default}") == []
