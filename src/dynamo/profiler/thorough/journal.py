"""Journal of measurements: one line per finished or failed one, so that an interrupted run continues where it ended."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo.core.errors import ConfigError

logger = logging.getLogger(__name__)

JOURNAL_FILE = "measurements.jsonl"


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one load on one engine, or the error that prevented it."""

    engine: str
    """Label of the engine's parallelism, and of its worker's command."""
    kind: str
    """`prefill`, `decode`, or `cache`: blocks (`isl`) of how many tokens (`osl`) the engine's cache has."""
    isl: int
    osl: int
    concurrency: int
    ttft_ms: float = 0.0
    """Mean time to first token."""
    itl_ms: float = 0.0
    """Mean inter-token latency."""
    tok_s: float = 0.0
    """Output tokens per second while all requests are running."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """Return what distinguishes this measurement from others."""
        return self.engine, self.kind, self.isl, self.osl, self.concurrency


@dataclass(slots=True)
class MeasurementJournal:
    """File of measurements, and those that it had at the start."""

    path: Path
    known: dict[tuple[str, str, int, int, int], Measurement] = field(default_factory=dict)

    @classmethod
    def opened(cls, directory: Path) -> "MeasurementJournal":
        """Return the journal of a directory; failed measurements in it are made again. A line cut off by a kill is skipped."""
        found = cls(directory / JOURNAL_FILE)
        if found.path.is_file():
            for line in found.path.read_bytes().splitlines():
                try:
                    one = msgspec.json.decode(line, type=Measurement)
                except msgspec.DecodeError as error:
                    logger.warning("%s: skipped a line: %s", found.path, error)
                    continue
                if not one.error:
                    found.known[one.key] = one
        finished = sum(one.kind != "cache" for one in found.known.values())
        if finished:
            logger.info("%s: %d measurements are finished and are not made again", found.path, finished)
        return found

    def find(self, engine: str, kind: str, isl: int, osl: int, concurrency: int) -> Measurement | None:
        """Return a finished measurement, or None."""
        found = self.known.get((engine, kind, isl, osl, concurrency))
        return None if found is None or found.error else found

    def cache(self, engine: str) -> tuple[int, int] | None:
        """Return the blocks of an engine's cache and the tokens of a block, or None if it was not deployed yet."""
        found = [one for one in self.known.values() if one.kind == "cache" and one.engine == engine]
        return (found[-1].isl, found[-1].osl) if found else None

    def add_cache(self, engine: str, blocks: int, block_tokens: int) -> None:
        """Append the size of an engine's cache, if it is not known."""
        if self.cache(engine) != (blocks, block_tokens):
            self.add(Measurement(engine=engine, kind="cache", isl=blocks, osl=block_tokens, concurrency=0))

    def add(self, one: Measurement) -> None:
        """Append a measurement. Raise `ConfigError` if the file cannot be written."""
        self.known[one.key] = one
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")
        except OSError as error:
            raise ConfigError(f"--output-dir: cannot write {self.path}: {error.strerror or error}") from None
