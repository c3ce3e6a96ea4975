"""Main of the profiler: command line, log, status file and exit code."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dynamo.core.boundaries import Rollback
from dynamo.core.config import environ, load
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.logging import setup
from dynamo.profiler.config import OUTPUT_DIR, ProfilerConfig
from dynamo.profiler.run import ProfilerRun
from dynamo.profiler.spec import parse_text, profile_spec
from dynamo.profiler.status import StatusFile

logger = logging.getLogger(__name__)

LOG_FILE = "profile_sla.log"
INVALID, FAILED = "Config validation failed", "Profiler failed"
USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str], prog: str = "python -m dynamo.profiler") -> int:
    """Run the profiler; return 0, 1 after a failure or 2 for wrong arguments. The status file has the reason."""
    try:
        config = load(ProfilerConfig, argv, prog=prog)
    except ConfigError as error:
        return _refused(StatusFile(Path(output_dir(argv))), str(error), USAGE_ERROR)
    status = StatusFile(Path(config.output_dir))
    try:
        with Rollback(lambda: _fail(status, "Profiler failed with an exception", f"unexpected error; see {LOG_FILE}")):
            return _run(config, status)
    except KeyboardInterrupt:
        return _refused(status, "interrupted; finished measurements are kept", INTERRUPTED)


def _run(config: ProfilerConfig, status: StatusFile) -> int:
    try:
        raw = read_spec(config.config or "")
        with log_file(Path(config.output_dir) / LOG_FILE):
            status.enter("Initializing", "Profiler job started")
            ProfilerRun(config, profile_spec(raw), status, environ().get("DGDR_NAME", "")).execute()
    except DynamoException as error:  # Such as an API server that cannot be reached.
        return _refused(status, str(error), FAILURE)
    return 0


def output_dir(argv: Sequence[str]) -> str:
    """Return the output directory of a command line that cannot be parsed."""
    for at, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == "--output-dir":
            return value if equals else next(iter(argv[at + 1 : at + 2]), OUTPUT_DIR)
    return OUTPUT_DIR


def read_spec(text: str) -> Any:
    """Return the specification: inline JSON, which is tried first, or a file. Raise `ConfigError`."""
    if text.lstrip()[:1] in ("{", "["):
        return parse_text(text, "inline JSON")
    path = Path(text)
    try:
        return parse_text(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise ConfigError(f"--config {shown}: neither inline JSON nor a readable file: {reason}") from None


def _refused(status: StatusFile, error: str, code: int) -> int:
    sys.stderr.write(f"error: {error}\n")
    is_begun = status.phase not in (None, "Initializing")
    _fail(status, FAILED if is_begun else INVALID, error)
    return code


def _fail(status: StatusFile, message: str, error: str) -> None:
    try:
        status.fail(message, error)
    except ConfigError as problem:
        sys.stderr.write(f"error: {problem}\n")


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Log to standard error, and within the block to a file of the result too. Raise `ConfigError` if it cannot be written."""
    setup()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    except OSError as error:
        raise ConfigError(f"--output-dir {path.parent}: cannot write {path.name}: {error.strerror or error}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
