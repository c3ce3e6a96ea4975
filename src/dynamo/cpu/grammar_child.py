"""GrammarChild: compiles a grammar on trial in a child process with limits on memory and time (`core.child_pool`).

A compiled grammar cannot be sent to another process. The engine compiles it again after a child has verified that it stays
within the limits.
"""

import sys
from typing import Any

import msgspec

from dynamo.core.child_process import serve
from dynamo.core.memory import resident_bytes
from dynamo.cpu.guided import Grammars
from dynamo.protocols.engine import GuidedDecoding


class GrammarTrial:
    """Tokenizer of one model, used to measure the cost of grammars."""

    def __init__(self, model_path: str, vocab_size: int) -> None:
        self._grammars = Grammars(model_path, vocab_size)
        self._grammars.ready()

    def measure(self, job: tuple[dict[str, Any], str | None]) -> int:
        """Return the size of the compiled grammar in bytes. Raise `InvalidArgument` for an invalid grammar."""
        guided, thoughts_end = job
        before = resident_bytes()
        guide = self._grammars.compiled(msgspec.convert(guided, GuidedDecoding), thoughts_end)
        guide.measure()
        return max(0, resident_bytes() - before)


if __name__ == "__main__":
    _, _, path, size = sys.argv[1:]
    raise SystemExit(serve(GrammarTrial(path, int(size)).measure))
