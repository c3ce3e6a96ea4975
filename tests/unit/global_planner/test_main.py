"""Options of the global planner."""

import pytest

from dynamo.core.config import load
from dynamo.core.errors import ConfigError
from dynamo.global_planner.main import GlobalPlannerOptions, separated


def read(*argv: str) -> GlobalPlannerOptions:
    return load(GlobalPlannerOptions, separated(["--namespace", "g", *argv]), prog="test")


def test_namespaces_are_separated_by_spaces_as_in_upstream() -> None:
    options = read("--managed-namespaces", "a", "b", "--environment", "virtual", "--max-total-gpus", "8")
    assert (options.managed_namespaces, options.max_total_gpus) == (["a", "b"], 8)


def test_global_planner_defaults_equal_those_of_upstream() -> None:
    options = read("--no-operation")
    found = (options.environment, options.max_total_gpus, options.min_total_gpus, options.intent_cache_ttl_seconds)
    assert options.operation is False
    assert found == ("kubernetes", -1, -1, 360.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-operation", "--max-total-gpus", "-2"], "--max-total-gpus -2"),
        (["--no-operation", "--max-total-gpus", "4", "--min-total-gpus", "5"], "--min-total-gpus 5"),
        (["--no-operation", "--intent-cache-ttl-seconds", "0"], "--intent-cache-ttl-seconds 0"),
        (["--environment", "mesos"], "mesos"),
    ],
)
def test_invalid_value_names_its_flag(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("-", "[-]")):
        read(*argv)
