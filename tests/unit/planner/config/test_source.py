"""Sources of planner settings: files, inline JSON, environment variables, flags of older releases."""

import logging
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import Mode, OptimizationTarget
from dynamo.planner.config.source import from_mapping, load_config


@pytest.mark.parametrize(
    ("name", "text"), [("c.json", '{"mode": "agg"}'), ("c.yaml", "mode: agg\n"), ("c.yml", "{mode: agg}")]
)
def test_load_config_reads_files(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_config(["--config", str(path)], {}).mode is Mode.AGG


def test_load_config_reads_inline_json() -> None:
    assert load_config(["--config", '{"mode": "agg"}'], {}).mode is Mode.AGG


@pytest.mark.parametrize("argument", ["/absent.json", "nonsense", '{"mode":'])
def test_load_config_refuses_a_value_that_is_neither_a_file_nor_json(argument: str) -> None:
    with pytest.raises(ConfigError, match="--config value is neither a valid file path nor valid JSON: "):
        load_config(["--config", argument], {})


def test_load_config_names_the_file_that_cannot_be_parsed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: [\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read: ") as refused:
        load_config(["--config", str(path)], {})
    assert "\n" not in str(refused.value)


def test_load_config_without_settings_names_the_missing_flag() -> None:
    with pytest.raises(ConfigError, match="--config: missing"):
        load_config([], {})


def test_environment_sets_fields_that_the_configuration_does_not() -> None:
    variables = {
        "DYN_NAMESPACE": "ns",
        "PROMETHEUS_ENDPOINT": "http://p",
        "PROMETHEUS_SSL_VERIFY": "yes",
        "PROMETHEUS_EXTRA_QUERY_PARAMS": "a=1&b=2",
        "PLANNER_PROMETHEUS_PORT": "9085",
        "DYN_PLANNER_PROMETHEUS_REQUEST_TIMEOUT_SECONDS": "2.5",
    }
    config = from_mapping({"metric_pulling_prometheus_endpoint": "http://mine"}, variables)
    assert (config.namespace, config.metric_pulling_prometheus_endpoint) == ("ns", "http://mine")
    assert config.metric_pulling_prometheus_ssl_verify
    assert config.metric_pulling_prometheus_extra_query_params == {"a": "1", "b": "2"}
    assert (config.metric_reporting_prometheus_port, config.metric_pulling_prometheus_request_timeout_seconds) == (
        9085,
        2.5,
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PLANNER_PROMETHEUS_PORT": "x"}, "PLANNER_PROMETHEUS_PORT='x': must be an integer"),
        ({"PROMETHEUS_EXTRA_QUERY_PARAMS": "a"}, "PROMETHEUS_EXTRA_QUERY_PARAMS='a': must be a query string"),
        ({"PROMETHEUS_CA_BUNDLE": "/absent"}, "must be an existing file"),
    ],
)
def test_environment_errors_name_the_variable(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({}, variables)


def test_flags_of_older_releases_are_converted_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(["--ttft", "200", "--max-gpu-budget", "4", "--no-operation", "--no-correction"], {})
    assert (config.ttft_ms, config.max_gpu_budget, config.advisory) == (200.0, 4, True)
    assert config.optimization_target is OptimizationTarget.SLA
    (line,) = [record.getMessage() for record in caplog.records if "deprecated flags" in record.getMessage()]
    assert "ttft_ms" in line
    assert "without effect: --no-correction" in line


def test_unknown_fields_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        from_mapping({"foo": 1}, {})
    assert "unknown fields are ignored: foo" in caplog.text
