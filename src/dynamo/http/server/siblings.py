"""Siblings: exchange of metrics and busy thresholds between frontend processes that share a port.

Each listens on a socket in a directory of their own (`dynamo.frontend.workers` makes it). A query is a line; its response
is everything up to the end of the connection. `merge` combines their metrics.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from dynamo.core.metrics import format_number
from dynamo.core.metrics_page import INLINE_CHARS
from dynamo.core.threads import in_few_threads

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # A process that takes longer hangs or is starting; its numbers are left out.
QUESTION_BYTES_MAX = 64 << 10
SUFFIX = ".sock"

Answer = Callable[[str], Awaitable[str]]
"""Handler of a query: from its arguments to its response."""


class Siblings:
    """One of the processes that share a port."""

    def __init__(self, folder: str, index: int) -> None:
        self._folder = Path(folder)
        self._own = self._folder / f"{index}{SUFFIX}"
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Answer] = {}

    def answer(self, word: str, answer: Answer) -> None:
        """Register the handler of queries that begin with this word."""
        self._answers[word] = answer

    async def start(self) -> None:
        """Listen. The socket of an earlier process with the same index is replaced."""
        with contextlib.suppress(FileNotFoundError):
            self._own.unlink()
        self._server = await asyncio.start_unix_server(self._serve, self._own, limit=QUESTION_BYTES_MAX)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self._own.unlink()

    async def query(self, question: str) -> list[str]:
        """Return the responses of the other processes; one that does not respond in time is left out."""
        others = [path for path in sorted(self._folder.glob(f"*{SUFFIX}")) if path != self._own]
        answers = await asyncio.gather(*(_query(path, question) for path in others))
        return [answer for answer in answers if answer is not None]

    async def metrics(self, own: str) -> str:
        """Return the combined metrics of all processes."""
        texts = [own, *await self.query("metrics")]
        if sum(map(len, texts)) <= INLINE_CHARS:
            return merge(texts)
        return await in_few_threads(lambda: merge(texts), "metrics", 1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                word, _, rest = (await reader.readline()).decode().rstrip("\n").partition(" ")
                answer = self._answers.get(word)
                if answer is not None:
                    writer.write((await answer(rest)).encode())
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            logger.debug("failed to respond to a query of another frontend process: %r", error)
        finally:
            writer.close()


async def _query(path: Path, question: str) -> str | None:
    writer = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(f"{question}\n".encode())
            return (await reader.read()).decode()
    except (OSError, TimeoutError) as error:
        logger.debug("frontend process %s does not respond: %r", path.name, error)
        return None
    finally:
        if writer is not None:
            writer.close()


_SAMPLE = re.compile(r"(?P<key>[a-zA-Z_:][\w:]*(?:\{.*\})?) (?P<value>\S+)")
_SAME_EVERYWHERE = re.compile(r"_model_|_connected$|_uptime_seconds$|_worker_|_info$")


def merge(texts: Iterable[str]) -> str:
    """Return one exposition that combines all of them."""
    families: dict[str, _Family] = {}
    for text in texts:
        family: _Family | None = None
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, _Family(name))
                family.help = family.help or line
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ", 3)
                family = families.setdefault(name, _Family(name))
                family.kind = kind
            elif family is not None and (sample := _SAMPLE.fullmatch(line)):
                family.add(sample["key"], float(sample["value"]))
    return "".join(one.render() for one in families.values())


class _Family:
    """All samples of one name, in order of appearance."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.help = ""
        self.kind = "untyped"
        self._samples: dict[str, float] = {}

    def add(self, key: str, value: float) -> None:
        known = self._samples.get(key)
        if known is None:
            self._samples[key] = value
        elif self.kind == "gauge" and _SAME_EVERYWHERE.search(self.name):
            self._samples[key] = max(known, value)
        else:
            self._samples[key] = known + value

    def render(self) -> str:
        head = [self.help] if self.help else []
        lines = [*head, f"# TYPE {self.name} {self.kind}"]
        lines += [f"{key} {format_number(value)}" for key, value in self._samples.items()]
        return "\n".join(lines) + "\n"
