"""Logging: the format of log lines and the filters of `DYN_LOG`. Lines go to stderr.

`DYN_LOG` is `level,target=level,…`; a target may be written as a Python module (`dynamo.runtime`) or as upstream's
(`dynamo_runtime::transports`). `DYN_LOGGING_CONFIG_PATH` names a TOML file with the same settings: `log_level`, for
processes without `DYN_LOG`, and a table `log_filters`, for all. `DYN_LOGGING_CONSOLE_FORMAT` is `readable` or `jsonl`.
`OTEL_EXPORT_LOGS_ENABLED` also sends the lines to a collector.
"""

import contextvars
import datetime as dt
import json
import logging
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any, TextIO

from dynamo.core.config import environ, read_bool, setting
from dynamo.core.errors import ConfigError
from dynamo.core.known_variables import warnings as unknown_variables
from dynamo.core.log_rate_limit import LogRateLimitFilter
from dynamo.core.tracing import exports, make_exporter, service_name, set_component

logger = logging.getLogger(__name__)

TRACE = 5
_reported: set[str] = set()
"""Warnings about the environment that this process has logged already; `setup` may be called again."""
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 10,
}
FORMATS = ("readable", "jsonl")
REQUEST_LOGGERS = ("httpx", "httpx2")
"""Loggers of libraries that write a line per request at level INFO; at that level only their warnings are shown."""
lifecycle = logging.getLogger("dynamo.lifecycle")
"""Lines of each step of each request. At level INFO they are written in JSON only: for programs that correlate them."""
CONFIG_PATH = "/opt/dynamo/etc/logging.toml"  # Present in upstream's images.

RequestScope = tuple[str, Mapping[str, str], str, str]
"""Request id, trace headers, span name, handler path (empty if there is none)."""

current_request: contextvars.ContextVar[RequestScope | None] = contextvars.ContextVar("request", default=None)
"""The request in whose context a line is logged. Its fields are computed only when a line is written."""

_STANDARD_COUNT = len(logging.makeLogRecord({}).__dict__)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def parse_filters(text: str) -> tuple[int, dict[str, int]]:
    """Return the default level and the level of each named target. Raises `ConfigError` for an unknown level."""
    level = logging.INFO
    targets: dict[str, int] = {}
    for part in text.split(","):
        name, equals, word = part.strip().rpartition("=")
        if not word:
            continue
        if word.lower() not in LEVELS:
            raise ConfigError(f"DYN_LOG={text!r}: unknown level {word!r}; expected one of {', '.join(LEVELS)}")
        if equals:
            targets |= dict.fromkeys(_targets(name), LEVELS[word.lower()])
        else:
            level = LEVELS[word.lower()]
    return level, targets


def setup(
    variables: Mapping[str, str] | None = None, stream: TextIO | None = None, *, component: str | None = None
) -> None:
    """Send this process's log to stderr as the environment configures; a further call replaces the earlier set-up.

    `component` names the process for OpenTelemetry, see `core.tracing.set_component`.
    """
    if component is not None:
        set_component(component)
    variables = environ() if variables is None else variables
    level, targets = levels(variables)
    style = setting("DYN_LOGGING_CONSOLE_FORMAT", "", str, variables)
    if not style:
        style = "jsonl" if setting("DYN_LOGGING_JSONL", False, read_bool, variables) else "readable"
    if style not in FORMATS:
        raise ConfigError(f"DYN_LOGGING_CONSOLE_FORMAT={style!r}: expected one of {', '.join(FORMATS)}")
    local = setting("DYN_LOG_USE_LOCAL_TZ", False, read_bool, variables)
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(logging.WARNING, "WARN")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(local) if style == "jsonl" else ReadableFormatter(local))
    handler.addFilter(LogRateLimitFilter())
    handlers: list[logging.Handler] = [handler]
    if exports(variables) and setting("OTEL_EXPORT_LOGS_ENABLED", False, read_bool, variables):
        handlers.append(exporting_handler(variables))
    root = logging.getLogger()
    for old in [old for old in root.handlers if getattr(old, "is_dynamo", False)]:
        root.removeHandler(old)
        old.close()
    for made in handlers:
        made.is_dynamo = True  # type: ignore[attr-defined]
        root.addHandler(made)
    root.setLevel(level)
    quiet = logging.WARNING if level == logging.INFO else level
    requests = dict.fromkeys(REQUEST_LOGGERS, quiet) | {lifecycle.name: level if style == "jsonl" else quiet}
    for name, target_level in {**requests, **targets}.items():
        logging.getLogger(name).setLevel(target_level)
    for warning in unknown_variables(variables):
        if warning not in _reported:
            _reported.add(warning)
            logger.warning("%s", warning)


def omit_origins() -> None:
    """Leave process, thread and task out of all log records: no format shows them, and each line would look them up.

    For processes that log a line per request; libraries in other processes may have formats of their own.
    """
    logging.logProcesses = logging.logMultiprocessing = logging.logThreads = False


def levels(variables: Mapping[str, str]) -> tuple[int, dict[str, int]]:
    """Return the default level and each target's. The file's target levels override those of `DYN_LOG`, as upstream."""
    path = setting("DYN_LOGGING_CONFIG_PATH", CONFIG_PATH, str, variables)
    general, filters = read_config(path)
    level, targets = parse_filters(setting("DYN_LOG", general, str, variables))
    return level, targets | filters


def read_config(path: str) -> tuple[str, dict[str, int]]:
    """Return the default level and the targets' levels of a TOML file; `info` and none if the file does not exist."""
    try:
        with open(path, "rb") as file:
            import tomllib  # Most processes have no such file.

            config = tomllib.load(file)
    except FileNotFoundError:
        return "info", {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"DYN_LOGGING_CONFIG_PATH={path}: {error}") from None
    general, filters = config.get("log_level", "info"), config.get("log_filters", {})
    if not isinstance(filters, dict):
        raise ConfigError(f"DYN_LOGGING_CONFIG_PATH={path}: log_filters: expected a table of levels by target")
    for word in (general, *filters.values()):
        if not isinstance(word, str) or word.lower() not in LEVELS:
            raise ConfigError(
                f"DYN_LOGGING_CONFIG_PATH={path}: unknown level {word!r}; expected one of {', '.join(LEVELS)}"
            )
    return general, {target: LEVELS[word.lower()] for name, word in filters.items() for target in _targets(name)}


def exporting_handler(variables: Mapping[str, str]) -> logging.Handler:
    """Return a handler that exports lines over OTLP with the fields of a JSON line. Raises `ConfigError`."""
    exporter, otel_logs = make_exporter("LOGS", "dynamo.core.otel_logs", variables)
    handler: logging.Handler = otel_logs.OtelLogHandler(exporter, service_name(variables), extra_fields)
    handler.addFilter(LogRateLimitFilter())
    return handler


class ReadableFormatter(logging.Formatter):
    """Format lines as `2026-01-02T03:04:05.678901Z  INFO dynamo.frontend: ready port=8000`."""

    def __init__(self, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in extra_fields(record).items())
        line = f"{timestamp(record, self._local)} {record.levelname:>5} {record.name}: {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Format a line as a JSON object: time, level, target, message, then the record's own fields."""

    def __init__(self, local: bool = False) -> None:
        super().__init__()
        self._local = local

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record, self._local),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


_seconds: dict[bool, tuple[int, str, str]] = {}
"""The last second that was written, in UTC and in local time, and the text before and after its microseconds."""


def timestamp(record: logging.LogRecord, local: bool) -> str:
    """Return the record's time to the microsecond, in UTC or in local time."""
    second = int(record.created)
    known = _seconds.get(local)
    if known is None or known[0] != second:
        head, _, tail = _whole_timestamp(second + 0.5, local).partition(".500000")
        known = _seconds[local] = second, head, tail
    return f"{known[1]}.{int((record.created - second) * 1e6):06d}{known[2]}"


def _whole_timestamp(created: float, local: bool) -> str:
    zone = None if local else dt.UTC
    moment = dt.datetime.fromtimestamp(created, zone)
    if local:
        return moment.astimezone().isoformat(timespec="microseconds")
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields passed in `extra`, and those of the current request."""
    given = islice(record.__dict__.items(), _STANDARD_COUNT, None)  # The constructor sets the standard ones first.
    own = {name: value for name, value in given if name not in _STANDARD}
    scope = current_request.get()
    return own if scope is None else {**scope_fields(scope), **own}


def scope_fields(scope: RequestScope) -> dict[str, str]:
    """Return a request's ids that are set, under upstream's names."""
    request_id, headers, span_name, path = scope
    fields = {"request_id": request_id} if request_id else {}
    if "x-request-id" in headers:
        fields["x_request_id"] = headers["x-request-id"]
    parts = headers.get("traceparent", "").split("-")
    if len(parts) >= 4 and len(parts[1]) == 32 and len(parts[2]) == 16:
        fields |= {"trace_id": parts[1], "span_id": parts[2], "span_name": span_name}
    if path:
        _, _, component, endpoint = path.split("/", 3)
        fields |= {"component": component, "endpoint": endpoint}
    return fields


def _targets(name: str) -> tuple[str, ...]:
    """Return the loggers that a target names.

    `dynamo_runtime::component` (upstream) and `dynamo.runtime.component` are the same one; upstream's crate `dynamo_llm`
    is several packages here.
    """
    name = name.strip().replace("::", ".")
    head, dot, rest = name.partition(".")
    if head.startswith("dynamo_"):
        head = head.replace("_", ".", 1)
    name = head + dot + rest
    if name == "dynamo.llm":
        return (name, *(f"dynamo.{package}" for package in _LLM_PACKAGES))
    return (
        next((ours + name[len(theirs) :] for theirs, ours in _UPSTREAM if f"{name}.".startswith(f"{theirs}.")), name),
    )


_LLM_PACKAGES = ("api", "grpc", "http", "kv_events", "model_card", "routing", "serving", "text")
_UPSTREAM = (
    ("dynamo.llm.http", "dynamo.http"),
    ("dynamo.llm.grpc", "dynamo.grpc"),
    ("dynamo.llm.kv_router", "dynamo.routing"),
    ("dynamo.llm.preprocessor", "dynamo.text.preprocessor"),
    ("dynamo.llm.tokenizers", "dynamo.text.tokenizer"),
    ("dynamo.llm.migration", "dynamo.serving.migration"),
    ("dynamo.llm.discovery", "dynamo.serving.models"),
    ("dynamo.llm.model_card", "dynamo.model_card"),
)
"""Upstream's log targets whose code is in another package here."""


def log_fields(target: logging.Logger, level: int, message: str, fields: Mapping[str, Any]) -> None:
    """Log a line with fields, for callers that log for every request.

    The record has no file and line: the search for them takes a third of the time of a line, and no format shows them.
    The caller checks `isEnabledFor`.
    """
    target.handle(target.makeRecord(target.name, level, "", 0, message, (), None, extra=fields))


def log_message(level: str, message: str, module: str, file: str, line: int) -> None:
    """Log a message as if `module` had logged it at this line of `file`; an unknown level counts as info."""
    number = LEVELS.get(level.lower(), logging.INFO)
    target = logging.getLogger(module)
    if target.isEnabledFor(number):
        target.handle(target.makeRecord(module, number, file, line, message, (), None))
