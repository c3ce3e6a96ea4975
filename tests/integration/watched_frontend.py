"""Frontend that records how much processor time its process uses between two turns of the event loop.

python watched_frontend.py FILE ARGUMENTS... appends each interval above `SHOWN_S` to the file, in seconds, one a line.
While the loop is held by a computation, in its own thread or in one that holds the interpreter, no other connection is
served. Time in which other processes have the cores does not count.
"""

import asyncio
import sys
import time
from typing import Any, TextIO

from dynamo.core.interpreter import run_command
from dynamo.frontend import main as frontend

BEAT_S = 0.002
SHOWN_S = 0.01


async def watch(file: TextIO) -> None:
    """Record the intervals for ever."""
    before_s = time.process_time()
    while True:
        await asyncio.sleep(BEAT_S)
        now_s = time.process_time()
        if now_s - before_s > SHOWN_S:
            file.write(f"{now_s - before_s:.3f}\n")
        before_s = now_s


def main() -> None:
    with open(sys.argv.pop(1), "w", buffering=1, encoding="ascii") as file:
        serve = frontend.serve

        async def watched(*arguments: Any) -> int:
            watching = asyncio.create_task(watch(file))
            try:
                return await serve(*arguments)
            finally:
                watching.cancel()

        frontend.serve = watched
        run_command("dynamo.frontend.main")


if __name__ == "__main__":
    main()
