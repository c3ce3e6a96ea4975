"""MetricsPage: the metrics of one process for scrapers, rendered in turns of the event loop.

With thousands of workers the text has a million characters and takes tens of milliseconds. Rendered at once it would delay
the tokens of all streams, and so would many scrapers at the same time, which therefore share one rendering. Texts of other
sources, such as an engine's own metrics, come from a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable

from dynamo.core.amortized import LoopTurn
from dynamo.core.metrics import CONTENT_TYPE, MetricsRegistry, whole_lines
from dynamo.core.openmetrics import OPENMETRICS_TYPE, openmetrics, prefers_openmetrics
from dynamo.core.threads import in_few_threads

INLINE_CHARS = 64 << 10  # A longer text is converted in a thread.

Combine = Callable[[str], Awaitable[str]]
"""Adds the metrics of other processes to the text of this one."""


class MetricsPage:
    """Exposition of a registry. Its samples are read in turn; those of one child belong together."""

    def __init__(self, registry: MetricsRegistry, combine: Combine | None = None) -> None:
        self._registry = registry
        self._combine = combine
        self._running: dict[str, asyncio.Task[str]] = {}
        """Renderings in progress by content type; empty for the text of this process alone."""

    async def respond(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the body for a scraper's `Accept` header."""
        if prefers_openmetrics(accept):
            return OPENMETRICS_TYPE, (await self._shared(OPENMETRICS_TYPE, self._openmetrics)).encode()
        return CONTENT_TYPE, (await self._shared(CONTENT_TYPE, self._text)).encode()

    async def own(self) -> str:
        """Return the text of this process alone, in format 0.0.4."""
        return await self._shared("", self._own)

    async def _shared(self, kind: str, render: Callable[[], Awaitable[str]]) -> str:
        """Return the result of the rendering of that kind that is in progress, or of a new one."""
        task = self._running.get(kind)
        if task is None:

            async def run() -> str:
                try:
                    return await render()
                finally:
                    del self._running[kind]

            task = self._running[kind] = asyncio.create_task(run())
        return await asyncio.shield(task)  # The end of one scrape does not end that of others.

    async def _own(self) -> str:
        turn, parts, pieces, size = LoopTurn(), list[str](), list[str](), 0
        for piece in self._registry.own_pieces():
            pieces.append(piece)
            size += len(piece)
            if size >= INLINE_CHARS:  # A million pieces are not joined at once.
                parts.append("".join(pieces))
                pieces.clear()
                size = 0
            await turn.yield_if_long()
        parts += pieces
        for callback in self._registry.texts:
            parts.append(whole_lines(await in_few_threads(callback, "metrics", 1)))
        return "".join(parts)

    async def _text(self) -> str:
        text = await self.own()
        return text if self._combine is None else await self._combine(text)

    async def _openmetrics(self) -> str:
        text = await self._shared(CONTENT_TYPE, self._text)
        if len(text) <= INLINE_CHARS:
            return openmetrics(text)
        return await in_few_threads(lambda: openmetrics(text), "metrics", 1)
