"""Logging of processes and engines under upstream's names: handlers, formatters, levels and their configuration."""

import json
import logging
import logging.config
import os
import tempfile
from collections.abc import MutableMapping
from typing import Any, cast

from dynamo.core.config import environ
from dynamo.core.logging import ReadableFormatter, setup

LEVELS = {
    "trace": logging.INFO,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
CONFIG_PATH = "/opt/dynamo/etc/logging.toml"
COLORS = {"DEBUG": "\033[2m", "INFO": "\033[32m", "WARNING": "\033[33m", "WARN": "\033[33m", "ERROR": "\033[31m"}
RESET = "\033[0m"


class LogHandler(logging.Handler):
    """Handler that passes records to this process's log, where its levels and its format apply."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, formatted, to the handlers that `setup` installed."""
        copied = logging.makeLogRecord({**vars(record), "msg": self.format(record), "args": None, "exc_info": None})
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, LogHandler) and record.levelno >= handler.level:
                handler.handle(copied)


class VllmColorFormatter(logging.Formatter):
    """Formatter of vLLM's records in the format of this process, with colors."""

    _readable = ReadableFormatter()

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, the level in color, with the traceback below."""
        line = self._readable.format(record)
        color = COLORS.get(record.levelname)
        return line.replace(record.levelname, f"{color}{record.levelname}{RESET}", 1) if color else line


class _HealthCheckFilter(logging.Filter):
    """Filter of the debug records that vLLM writes at each health check."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.funcName != "check_health" or record.levelno > logging.DEBUG


def configure_logger(service_name: str | None, worker_id: int | None, level: int = logging.INFO) -> None:
    """Add a handler to the root logger that writes to stderr, with a prefix of service and worker."""
    prefix = construct_formatter_prefix(service_name, worker_id)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[{prefix}] %(message)s" if prefix else None))
    for one in (handler, root := logging.getLogger()):
        one.setLevel(level)
    root.addHandler(handler)


def construct_formatter_prefix(service_name: str | None, worker_id: int | None) -> str:
    """Return `service:worker`, or the part of it that is given."""
    return f"{service_name or ''}{'' if worker_id is None else f':{worker_id}'}".strip()


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Send this process's log to stderr as set by `DYN_LOG` and `DYN_LOGGING_…`, and configure the engines' loggers.

    The arguments have no effect: older releases prefixed lines with them; instances have ids now.
    """
    setup()
    level = log_level_mapping(environ().get("DYN_LOG", "info"))
    skips_sglang = get_bool_env_var("DYN_SKIP_SGLANG_LOG_FORMATTING")
    for configure in (configure_vllm_logging, *([] if skips_sglang else [configure_sglang_logging])):
        configure(level)
    logging.getLogger("tag").setLevel(logging.ERROR)


def log_level_mapping(level: str) -> int:
    """Return Python's number of a level of `DYN_LOG`; INFO for an unknown one."""
    return LEVELS.get(level, logging.INFO)


def python_log_level_mapping(filters: str) -> int:
    """Return the lowest level that any filter of `DYN_LOG` enables; DEBUG if a file may enable more."""
    files = {CONFIG_PATH, environ().get("DYN_LOGGING_CONFIG_PATH", CONFIG_PATH)}
    if any(map(os.path.isfile, files)):
        return logging.DEBUG
    levels = LEVELS | {"trace": logging.DEBUG}
    words = (part.rpartition("=")[2].strip().lower() for part in filters.split(","))
    return min(levels.get(word, logging.INFO) for word in words)


def configure_sglang_logging(dyn_level: int) -> None:
    """Write a logging configuration for SGLang, by which its records appear in this process's log."""
    handler = {"class": f"{__name__}.{LogHandler.__name__}", "level": logging.getLevelName(dyn_level)}
    with tempfile.NamedTemporaryFile("w", prefix="dynamo-sglang-", suffix=".json", delete=False) as file:
        json.dump(_configuration(handler, handler["level"], "sglang"), file)
    _set("SGLANG_LOGGING_CONFIG_PATH", file.name)


def _configuration(handler: dict[str, Any], level: str, engine: str, **more: Any) -> dict[str, Any]:
    """Return a configuration for `logging.config` by which an engine's records reach one handler."""
    target = {"handlers": ["dynamo"], "level": level, "propagate": False}
    loggers = dict.fromkeys((engine, "gpu_memory_service"), target)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"dynamo": handler},
        "loggers": loggers,
        **more,
    }


def configure_vllm_logging(dyn_level: int) -> None:
    """Send vLLM's records to stderr in the format of this process, at the level of `VLLM_LOGGING_LEVEL`.

    Its subprocesses use its own configuration. `dyn_level` has no effect, as in upstream.
    """
    _set("VLLM_CONFIGURE_LOGGING", "1")
    handler = {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stderr"}
    level = environ().get("VLLM_LOGGING_LEVEL", "INFO").upper()
    logging.config.dictConfig(_configuration(handler, level, "vllm", formatters={"vllm": {"()": VllmColorFormatter}}))
    requests = logging.getLogger("vllm.v1.engine.async_llm")
    if not any(isinstance(one, _HealthCheckFilter) for one in requests.filters):
        requests.addFilter(_HealthCheckFilter())


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether a variable is `true` or `1`; other text than `false` or `0` is logged."""
    text = environ().get(name, default)
    found = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if found is None:
        logging.getLogger(__name__).warning("ignored %s=%r: must be true or false", name, text)
    return bool(found)


def _set(name: str, value: str) -> None:
    cast(MutableMapping[str, str], environ())[name] = value
