"""Command `dynamo doctor`: checks this machine and its settings, and writes a bundle for a bug report."""

import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.core.config import environ, load, option
from dynamo.core.errors import ConfigError
from dynamo.core.progress import activity
from dynamo.ops.archive import write_archive
from dynamo.ops.report import CheckRow, as_json, as_table, exit_status, failed

COLUMNS_MAX = 140
PORT_MAX = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Check this machine, its settings and the servers they name; exit status 1 if a check fails. Nothing is changed."""

    model: str | None = option(None, "MODEL", None, "Model directory, or a Hugging Face model id, to check as well")
    http_host: str = option("127.0.0.1", "--http-host", "DYN_HTTP_HOST", "Address that the frontend will listen on")
    http_port: int = option(8000, "--http-port", "DYN_HTTP_PORT", "Port that the frontend will listen on")
    json: bool = option(False, "--json", None, "Print the report as JSON")
    bundle: str | None = option(
        None, "--bundle", None, "Also write a tar.gz for a bug report: report, environment, records, logs; no secrets"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.http_port <= PORT_MAX:
            raise ConfigError(f"--http-port {self.http_port}: must be from 0 to {PORT_MAX}")


def doctor(argv: Sequence[str]) -> int:
    """Run `dynamo doctor`; return 1 if a check fails. Raise `ConfigError` for wrong options."""
    variables = environ()
    # A wrong variable is a row of the report; only the flags of this command must be valid.
    own = {name: value for name, value in variables.items() if name != "DYN_HTTP_PORT" or is_port(value.strip())}
    config = load(DoctorConfig, argv, own, prog="dynamo doctor")
    try:
        from dynamo.ops.doctor.collect import collect, rows_of_machine
    except ImportError as error:
        return _without_imports(error, is_json=config.json)
    # Failed connections are rows of the report, not log lines.
    logging.getLogger("dynamo").addHandler(logging.NullHandler())
    with activity("checking this machine and the servers of its settings", is_quiet=config.json) as show:
        facts = collect(variables, host=config.http_host, http_port=config.http_port, model=config.model)
        rows = rows_of_machine(facts)
        if config.bundle is not None:
            from dynamo.ops.doctor.bundle import bundle_files

            show(f"writing {config.bundle}")
            write_archive(config.bundle, bundle_files(rows, facts), time.time())
    print_report(rows, is_json=config.json)
    if config.bundle is not None:
        sys.stderr.write(f"wrote {config.bundle}; logs may contain parts of requests: read it before you share it\n")
    return exit_status(rows)


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port."""
    return text.isdigit() and int(text) <= PORT_MAX


def _without_imports(error: ImportError, *, is_json: bool) -> int:
    """Report the packages alone, where one that everything needs is missing or broken."""
    from dynamo.ops.doctor.package_checks import package_rows
    from dynamo.ops.doctor.packages import package_facts

    facts = package_facts()
    rows = [*package_rows(facts, environ()), failed("imports", str(error), f"run: {facts.install['']}")]
    print_report(rows, is_json=is_json)
    return exit_status(rows)


def print_report(rows: Sequence[CheckRow], *, is_json: bool) -> None:
    """Print a report to standard output, with colours on a terminal."""
    if is_json:
        print(as_json(rows))
        return
    width = min(COLUMNS_MAX, shutil.get_terminal_size((110, 24)).columns)
    is_colored = sys.stdout.isatty() and not environ().get("NO_COLOR") and environ().get("TERM") != "dumb"
    print(as_table(rows, width=width, is_colored=is_colored))
