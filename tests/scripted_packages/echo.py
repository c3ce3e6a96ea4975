"""An engine that repeats its prompt, for scripted packages: responses, cache and failures.

It has a child process, as real engines do, whose end is the engine's. Events are written to files of the folder that
`SCRIPTED_FOLDER` names, which tests read.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0.001"))
FOLDER = Path(os.environ["SCRIPTED_FOLDER"])


def note(kind: str, text: str) -> None:
    """Append an event to its file."""
    with open(FOLDER / f"{os.getpid()}.{kind}", "a", encoding="utf-8") as file:
        file.write(text + "\n")


def start_child() -> "subprocess.Popen[bytes]":
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    note("child", str(child.pid))
    return child


def stop_child(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()


def answer(prompt: list[int], count: int) -> list[int]:
    """Return the response: a part of the prompt that depends on all of it."""
    start = int.from_bytes(digest(prompt)[:4], "big")
    return [prompt[(start + at) % len(prompt)] for at in range(count)]


def digest(prompt: list[int]) -> bytes:
    return hashlib.sha256(repr(prompt).encode()).digest()


class Held:
    """Cached blocks, each identified by a hash of all blocks before it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._names: set[int] = set()

    def add(self, prompt: list[int]) -> tuple[int, int | None, list[int], list[int]]:
        """Add a prompt; return the number of cached tokens, the parent hash, and the hashes and tokens of the new
        blocks.
        """
        size = self.block_tokens
        names = [
            int.from_bytes(digest(prompt[: at + size])[:8], "big") >> 1 for at in range(0, len(prompt) - size + 1, size)
        ]
        held = 0
        while held < len(names) and names[held] in self._names:
            held += 1
        self._names.update(names)
        return held * size, names[held - 1] if held else None, names[held:], prompt[held * size : len(names) * size]
