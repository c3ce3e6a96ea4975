"""Logging: upstream's name for our set-up."""

import logging

import pytest

from dynamo.runtime.logging import (
    LogHandler,
    VllmColorFormatter,
    configure_dynamo_logging,
    construct_formatter_prefix,
    log_level_mapping,
    python_log_level_mapping,
)


def test_configure_dynamo_logging_configures_the_root_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    monkeypatch.setenv("DYN_LOG", "warn")
    for name in ("VLLM_CONFIGURE_LOGGING", "SGLANG_LOGGING_CONFIG_PATH"):
        monkeypatch.setenv(name, "")  # Restored at the end.
    try:
        configure_dynamo_logging(service_name="s", worker_id=1)
        assert root.level == logging.WARNING
        assert len(root.handlers) == len(before) + 1
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_log_filters_set_levels() -> None:
    assert python_log_level_mapping("warn,dynamo=debug") == logging.DEBUG
    assert log_level_mapping("unknown") == logging.INFO


def test_formatter_prefix_contains_the_given_parts() -> None:
    assert construct_formatter_prefix("s", 1) == "s:1"
    assert construct_formatter_prefix(None, None) == ""


def test_records_of_engines_appear_in_the_log_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("sglang", logging.ERROR, __file__, 1, "failed: %s", ("x",), None)
    LogHandler().emit(record)
    assert "failed: x" in caplog.text
    assert "\033[31m" in VllmColorFormatter().format(record)
