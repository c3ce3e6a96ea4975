"""Siblings: frontend processes that share a port, and what they tell each other: their metrics, and busy thresholds.

Each listens on a socket in a directory of their own (`dynamo.frontend.workers` makes it). A question is a line; what
comes back until the end of the connection is its answer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from dynamo.http.server.metrics_merge import merge

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # One that takes longer hangs, or is just starting; the others' numbers are worth more than its.
QUESTION_BYTES_MAX = 64 << 10
SUFFIX = ".sock"

Answer = Callable[[str], Awaitable[str]]
"""From a question's words to its answer."""


class Siblings:
    """A process among those that share its port."""

    def __init__(self, folder: str, index: int) -> None:
        self._folder = Path(folder)
        self._own = self._folder / f"{index}{SUFFIX}"
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Answer] = {}

    def answer(self, word: str, answer: Answer) -> None:
        """How questions that begin with this word are answered."""
        self._answers[word] = answer

    async def start(self) -> None:
        """Listens. The socket of a process that had this place before is replaced."""
        with contextlib.suppress(FileNotFoundError):
            self._own.unlink()
        self._server = await asyncio.start_unix_server(self._serve, self._own, limit=QUESTION_BYTES_MAX)

    async def close(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self._own.unlink()

    async def ask(self, question: str) -> list[str]:
        """What each of the others says; one that says nothing in time is left out."""
        others = [path for path in sorted(self._folder.glob(f"*{SUFFIX}")) if path != self._own]
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return [answer for answer in answers if answer is not None]

    async def metrics(self, own: str) -> str:
        """The metrics of all of them."""
        return merge([own, *await self.ask("metrics")])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                word, _, rest = (await reader.readline()).decode().rstrip("\n").partition(" ")
                answer = self._answers.get(word)
                if answer is not None:
                    writer.write((await answer(rest)).encode())
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            logger.debug("a sibling's question was not answered: %r", error)
        finally:
            writer.close()


async def _ask(path: Path, question: str) -> str | None:
    writer = None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(f"{question}\n".encode())
            return (await reader.read()).decode()
    except (OSError, TimeoutError) as error:
        logger.debug("sibling %s does not answer: %r", path.name, error)
        return None
    finally:
        if writer is not None:
            writer.close()
