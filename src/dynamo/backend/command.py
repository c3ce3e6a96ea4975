"""Command: one line that makes an engine class a command.

    class MyEngine:                                  # an `LLMEngine`
        @classmethod
        def from_options(cls, options: MyOptions) -> "MyEngine": ...

    if __name__ == "__main__":
        run(MyEngine, MyOptions)

`dynamo.backend.sample` is a short example.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeVar

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, WorkerOptions
from dynamo.backend.engine import LLMEngine
from dynamo.backend.process import run_worker
from dynamo.core.config import exit_on_config_error
from dynamo.core.unsupported_flags import load

Options = TypeVar("Options", bound=WorkerOptions)
Given_contra = TypeVar("Given_contra", bound=WorkerOptions, contravariant=True)


class EngineClass(Protocol[Given_contra]):
    """A class of engines that can be created from a command line."""

    def from_options(self, options: Given_contra, /) -> LLMEngine:
        """Return the engine, not loaded yet."""


def run(engine: EngineClass[Options], options: type[Options], argv: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line, serve until a signal, and exit; a wrong setting prints one line, with status 2."""

    def main() -> int:
        given = load(options, sys.argv[1:] if argv is None else argv, UNSUPPORTED_WORKER_FLAGS)
        return run_worker(given, lambda: engine.from_options(given))

    exit_on_config_error(main)
