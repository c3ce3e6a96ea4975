"""Logging: levels, filters and formats of log lines."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.logging import (
    LEVELS,
    REQUEST_LOGGERS,
    TRACE,
    RequestScope,
    current_request,
    levels,
    log_fields,
    log_message,
    omit_origins,
    parse_filters,
    setup,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.addLevelName(logging.WARNING, "WARNING")
    for name in ("t.quiet", "t.loud", *REQUEST_LOGGERS):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_log_filter_sets_levels_for_all_and_for_targets() -> None:
    assert parse_filters("warn,dynamo.runtime=debug,dynamo_llm::http=trace") == (
        logging.WARNING,
        {"dynamo.runtime": logging.DEBUG, "dynamo.http": TRACE},
    )
    assert parse_filters("") == (logging.INFO, {})


def test_upstream_llm_crate_filter_covers_the_packages_that_implement_it() -> None:
    _, targets = parse_filters("dynamo_llm=debug")
    assert {"dynamo.llm", "dynamo.http", "dynamo.serving", "dynamo.text", "dynamo.routing"} <= targets.keys()


def test_log_filter_refuses_an_unknown_level_and_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"loud.*trace, debug, info"):
        parse_filters("loud")
    with pytest.raises(ConfigError, match="DYN_LOGGING_CONSOLE_FORMAT"):
        setup({"DYN_LOGGING_CONSOLE_FORMAT": "xml"})


def test_log_filter_drops_lines_below_their_level() -> None:
    stream = io.StringIO()
    setup({"DYN_LOG": "info,t.quiet=error,t.loud=debug"}, stream)
    logging.getLogger("t.quiet").warning("no")
    logging.getLogger("t.loud").debug("yes")
    logging.getLogger("t.other").debug("no")
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["yes"]


def test_readable_log_line_has_time_level_target_message_and_fields() -> None:
    stream = io.StringIO()
    setup({}, stream)
    logging.getLogger("t.other").info("ready %d", 3, extra={"port": 8000})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z  INFO t\.other: ready 3 port=8000\n", stream.getvalue()
    )


def test_json_log_line_has_the_keys_of_released_dynamo() -> None:
    stream = io.StringIO()
    setup({"DYN_LOGGING_CONSOLE_FORMAT": "jsonl"}, stream)
    try:
        int("boom")
    except ValueError:
        logging.getLogger("t.other").warning("careful", exc_info=True, extra={"trace_id": "ab"})
    line = json.loads(stream.getvalue())
    assert {"time", "level", "target", "message", "trace_id", "exception"} == set(line)
    assert (line["level"], line["target"], line["message"], line["trace_id"]) == ("WARN", "t.other", "careful", "ab")
    assert "ValueError: invalid literal" in line["exception"]


def test_logging_setup_replaces_an_earlier_setup() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup({"DYN_LOGGING_JSONL": "1"}, first)
    setup({"DYN_LOG_USE_LOCAL_TZ": "1"}, second)
    logging.getLogger("t.other").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def log_line(scope: RequestScope | None, **extra: str) -> dict[str, str]:
    stream = io.StringIO()
    setup({"DYN_LOGGING_JSONL": "1"}, stream)
    token = current_request.set(scope)
    logging.getLogger("t.other").info("hello", extra=extra)
    current_request.reset(token)
    line: dict[str, str] = json.loads(stream.getvalue())
    return {name: value for name, value in line.items() if name not in {"time", "level", "target", "message"}}


def test_log_line_of_a_request_has_its_id_and_trace() -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "x"}
    assert log_line(("r", headers, "handle_payload", "1/ns/comp/ep")) == {
        "request_id": "r",
        "x_request_id": "x",
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "span_name": "handle_payload",
        "component": "comp",
        "endpoint": "ep",
    }
    assert log_line(("r", {}, "http-request", "")) == {"request_id": "r"}
    assert log_line(("r", {"traceparent": "nonsense"}, "http-request", "")) == {"request_id": "r"}
    assert log_line(None) == {}


def test_log_line_fields_take_precedence_over_request_fields() -> None:
    assert log_line(("r", {}, "", ""), request_id="other") == {"request_id": "other"}


def write(path: Path, text: str) -> dict[str, str]:
    path.write_text(text)
    return {"DYN_LOGGING_CONFIG_PATH": str(path)}


def test_logging_file_sets_levels_and_takes_precedence_over_the_variable(tmp_path: Path) -> None:
    variables = write(
        tmp_path / "logging.toml",
        'log_level = "WARN"\n[log_filters]\n"dynamo_runtime::pipeline" = "debug"\n"t.loud" = "trace"\n',
    )
    targets = {"dynamo.runtime.pipeline": logging.DEBUG, "t.loud": TRACE}
    assert levels(variables) == (logging.WARNING, targets)
    assert levels({**variables, "DYN_LOG": "error,t.loud=off,t.quiet=off"}) == (
        logging.ERROR,
        {**targets, "t.quiet": LEVELS["off"]},
    )


def test_logging_variable_applies_without_a_file(tmp_path: Path) -> None:
    assert levels({"DYN_LOGGING_CONFIG_PATH": str(tmp_path / "none.toml")}) == (logging.INFO, {})
    assert levels(write(tmp_path / "empty.toml", "")) == (logging.INFO, {})


@pytest.mark.parametrize(
    "text", ["log_level = 5", 'log_level = "loud"', '[log_filters]\n"a" = 1', 'log_filters = "info"', "log_level ="]
)
def test_logging_file_error_names_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"DYN_LOGGING_CONFIG_PATH=.*wrong\.toml"):
        levels(write(tmp_path / "wrong.toml", text))


def test_logging_setup_reports_an_unknown_variable_once() -> None:
    stream = io.StringIO()
    for _ in range(2):
        setup({"DYN_HTTP_PROTT": "1"}, stream)
    assert stream.getvalue().count("DYN_HTTP_PROTT: unknown variable, ignored; did you mean DYN_HTTP_PORT?") == 1
    assert " WARN dynamo.core.logging: " in stream.getvalue()


def test_message_is_logged_for_a_module(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        log_message("info", "hidden", "engine", "a.py", 1)
        log_message("error", "100% full", "engine", "a.py", 7)
    assert [(one.name, one.levelno, one.getMessage(), one.lineno) for one in caplog.records] == [
        ("engine", logging.ERROR, "100% full", 7)
    ]


@pytest.mark.parametrize(("filters", "is_written"), [("info", False), ("debug", True), ("info,httpx2=info", True)])
def test_requests_of_http_clients_are_logged_on_request_only(filters: str, is_written: bool) -> None:
    stream = io.StringIO()
    setup({"DYN_LOG": filters}, stream)
    logging.getLogger("httpx2").info("GET /")
    assert ("GET /" in stream.getvalue()) is is_written


def test_line_of_a_request_has_the_text_of_an_ordinary_line() -> None:
    stream, target = io.StringIO(), logging.getLogger("t.requests")
    setup({}, stream)
    target.info("request completed", extra={"status": "success", "elapsed_ms": 12})
    log_fields(target, logging.INFO, "request completed", {"status": "success", "elapsed_ms": 12})
    ordinary, short = (line.partition(" ")[2] for line in stream.getvalue().splitlines())
    assert short == ordinary
    assert "t.requests: request completed status=success elapsed_ms=12" in short


def test_records_without_origins_have_no_process_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("logProcesses", "logMultiprocessing", "logThreads"):
        monkeypatch.setattr(logging, name, True)
    omit_origins()
    record = logging.getLogger("any").makeRecord("any", logging.INFO, "", 0, "text", (), None)
    assert (record.process, record.processName, record.thread, record.threadName) == (None, None, None, None)
