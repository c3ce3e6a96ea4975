"""Command: runs an engine class as a worker process.

if __name__ == "__main__":
    run(MyEngine)
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from dynamo.common.backend.engine import BaseEngine
from dynamo.common.backend.worker import Worker, WorkerConfig
from dynamo.core import logging as log
from dynamo.core.errors import ConfigError
from dynamo.core.parent import die_with_parent

EngineFactory = Callable[[list[str] | None], Awaitable[tuple[BaseEngine, WorkerConfig]]]


async def _start(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
) -> None:
    engine, config = await (engine_factory or engine_cls.from_args)(argv)
    await Worker(engine, config).run()


def run(
    engine_cls: type[BaseEngine],
    argv: list[str] | None = None,
    engine_factory: EngineFactory | None = None,
) -> None:
    """Create the engine by `engine_factory`, or by the class's `from_args`, and serve it until a signal.

    An invalid setting ends the process with one line and status 2; the engine's error is raised.
    """
    log.setup(component="worker")
    die_with_parent()
    try:
        asyncio.run(_start(engine_cls, argv, engine_factory))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
