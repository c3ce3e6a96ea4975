"""An engine that repeats its prompt, for scripted packages: its responses, its cache, and its failures.

It has a child process, as real engines do, whose end is the engine's. What happens is written into files of the folder
that `SCRIPTED_FOLDER` names, where tests look.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0.001"))
FOLDER = Path(os.environ["SCRIPTED_FOLDER"])


def note(kind: str, text: str) -> None:
    """Writes down what happened."""
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
    """The response to a prompt: a part of it that depends on all of it."""
    start = int.from_bytes(digest(prompt)[:4], "big")
    return [prompt[(start + at) % len(prompt)] for at in range(count)]


def digest(prompt: list[int]) -> bytes:
    return hashlib.sha256(repr(prompt).encode()).digest()


class Held:
    """The blocks that the cache holds: by a name that is made of all before them."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._names: set[int] = set()

    def add(self, prompt: list[int]) -> tuple[int, int | None, list[int], list[int]]:
        """How many tokens were held, the name before what is new, the new blocks' names, and their tokens."""
        size = self.block_tokens
        names = [
            int.from_bytes(digest(prompt[: at + size])[:8], "big") >> 1 for at in range(0, len(prompt) - size + 1, size)
        ]
        held = 0
        while held < len(names) and names[held] in self._names:
            held += 1
        self._names.update(names)
        return held * size, names[held - 1] if held else None, names[held:], prompt[held * size : len(names) * size]
