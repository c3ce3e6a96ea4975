"""Convert: public traces into Mooncake's format, by `dynamo replay convert`.

    azure       TIMESTAMP,ContextTokens,GeneratedTokens                     a time of day, as published by Azure
    burstgpt    Timestamp,Model,Request tokens,Response tokens,…            seconds; failed rows have no answer

Neither records shared prefixes: each request gets unique blocks.
"""

import csv
import gzip
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.replay.datagen import write_rows

COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Converts a trace of Azure or BurstGPT into Mooncake's format."""

    source: str = option("azure", "--from", None, "Format of the input", choices=tuple(COLUMNS))
    input_file: str | None = option(None, "--input-file", None, "CSV file, optionally compressed")
    output_file: str | None = option(None, "--output-file", None, "Output file (default: the terminal)")
    block_size: int = option(512, "--block-size", None, "Tokens per hash id")

    def __post_init__(self) -> None:
        if self.input_file is None:
            raise ConfigError("--input-file is missing")
        if self.block_size < 1:
            raise ConfigError(f"--block-size {self.block_size}: expected 1 or more")


def converted(found: Iterable[Mapping[str, str]], source: str, block_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield Mooncake rows of requests with a prompt and an answer. Raise `ConfigError` with the invalid row."""
    at_name, input_name, output_name = COLUMNS[source]
    began: float | None = None
    fresh = 0
    for number, row in enumerate(found, 2):
        try:
            at_ms = _time_ms(row[at_name])
            tokens, output = int(float(row[input_name])), int(float(row[output_name]))
        except KeyError as error:
            raise ConfigError(f"line {number}: missing column {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {number}: {error}") from None
        began = at_ms if began is None else began
        if tokens < 1 or output < 1:
            continue
        blocks = -(-tokens // block_tokens)
        yield {
            "timestamp": round(at_ms - began),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": list(range(fresh, fresh + blocks)),
        }
        fresh += blocks


def _time_ms(text: str) -> float:
    """Parse seconds, or a time of day with up to seven fractional digits."""
    try:
        return float(text) * 1000
    except ValueError:
        pass
    whole, _, part = text.strip().removesuffix("Z").partition(".")
    digits = part.split("+")[0]
    moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return moment.timestamp() * 1000 + (float(f"0.{digits}") * 1000 if digits else 0.0)


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.convert") -> int:
    """Convert one file."""
    config = load(ConvertConfig, argv, prog=prog)
    path = config.input_file or ""
    try:
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            rows = list(converted(csv.DictReader(file), config.source, config.block_size))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    write_rows(config.output_file, sorted(rows, key=lambda row: int(row["timestamp"])))
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
