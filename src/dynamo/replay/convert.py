"""Convert: public traces into Mooncake's format, by `dynamo replay convert`.

    azure       TIMESTAMP,ContextTokens,GeneratedTokens                     a time of day, as published by Azure
    burstgpt    Timestamp,Model,Request tokens,Response tokens,…            seconds; failed rows have no answer

Neither records shared prefixes: each request gets unique blocks.
"""

import csv
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError
from dynamo.replay.datagen import write_rows
from dynamo.replay.trace_lines import LENGTH_MAX, lines

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


def csv_rows(paths: Sequence[str], trace_format: str | None = None) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """Yield the rows of CSV files with their locations. Raise `ConfigError` for a file that cannot be read."""
    for path in paths:
        place = path

        def text(of: str = path) -> Iterator[str]:
            nonlocal place
            for at, line in lines([of], trace_format):
                place = at
                yield line.decode("utf-8", "replace")

        try:
            for row in csv.DictReader(text()):
                yield place, row
        except csv.Error as error:
            raise ConfigError(f"{place}: {error}") from None


def converted(
    found: Iterable[tuple[str, Mapping[str, str | None]]], source: str, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield Mooncake rows of requests with a prompt and an answer, whose times begin at 0, in their order.

    Raise `ConfigError` with the invalid row.
    """
    at_name, input_name, output_name = COLUMNS[source]
    rows = [
        (_time_ms(place, row, at_name), _count(place, row, input_name), _count(place, row, output_name))
        for place, row in found
    ]
    first_ms, fresh = min((at_ms for at_ms, *_ in rows), default=0.0), 0
    for at_ms, tokens, output in rows:
        if tokens < 1 or output < 1:
            continue
        blocks = -(-tokens // block_tokens)
        yield {
            "timestamp": round(at_ms - first_ms),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": list(range(fresh, fresh + blocks)),
        }
        fresh += blocks


def _cell(place: str, row: Mapping[str, str | None], name: str) -> str:
    """Return the text of a column. Raise `ConfigError` if there is none."""
    text = row.get(name)
    if text is None:
        columns = ", ".join(str(one) for one in row if one is not None)
        raise ConfigError(f"{place}: column {name} is missing: the row has {columns[:200]}")
    return text


def _count(place: str, row: Mapping[str, str | None], name: str) -> int:
    """Return a number of tokens. Raise `ConfigError`."""
    text = _cell(place, row, name)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= LENGTH_MAX:
        raise ConfigError(f"{place}: {name} is {text[:60]!r}: must be a number from 0 to {LENGTH_MAX}")
    return int(number)


def _time_ms(place: str, row: Mapping[str, str | None], name: str) -> float:
    """Parse seconds, or a time of day with up to seven fractional digits. Raise `ConfigError`."""
    text = _cell(place, row, name)
    try:
        seconds = _seconds(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"{place}: {name} is {text[:60]!r}: must be seconds, or a date and a time of day")
    return seconds * 1000


def _seconds(text: str) -> float:
    """Return a time in seconds. Raise `ValueError`."""
    try:
        return float(text)
    except ValueError:
        pass
    whole, _, part = text.strip().removesuffix("Z").partition(".")
    digits = part.split("+")[0]
    moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def main(argv: Sequence[str], prog: str = "python -m dynamo.replay.convert") -> int:
    """Convert one file."""
    config = load(ConvertConfig, argv, prog=prog)
    rows = list(converted(csv_rows([config.input_file or ""]), config.source, config.block_size))
    write_rows(config.output_file, sorted(rows, key=lambda row: int(row["timestamp"])))
    return 0


if __name__ == "__main__":
    exit_on_config_error(lambda: main(sys.argv[1:]))
