"""Record `dynamo serve` and `dynamo chat` in a terminal and draw the session as docs/pictures/session.svg.

    .venv/bin/python tools/session_picture.py

The server serves the bundled model on the default port; the questions are typed into a pseudo-terminal.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "session.svg"
QUESTIONS = ("What is a worker?", "What is 17 + 25?")
READY, PROMPT = "Press Ctrl-C to stop.", "> "
COLUMNS, LINE_PX, FONT_PX, MARGIN_PX = 112, 18, 13, 18
CHARACTER_PX = 7.85  # Width of a character of a 13 px monospace font.
DEADLINE_S = 60.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=\n)")
OVERWRITTEN = re.compile(r"[^\n]*\r")


class Terminal:
    """A program in a pseudo-terminal, and its output so far."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self._output = ""
        self._typed_at = 0

    @property
    def text(self) -> str:
        """The output as the terminal shows it."""
        return OVERWRITTEN.sub("", CONTROL.sub("", self._output))

    def read_until(self, ending: str) -> None:
        """Read until the output since the last input ends with `ending`. Raise `TimeoutError`."""
        deadline = time.monotonic() + DEADLINE_S
        while not CONTROL.sub("", self._output[self._typed_at :]).rstrip("\n").endswith(ending):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                raise TimeoutError(f"no {ending!r} in {self.text!r}")
            self._output += os.read(self._ours, 4096).decode(errors="replace")

    def type(self, line: str) -> None:
        self._typed_at = len(self._output)
        os.write(self._ours, f"{line}\n".encode())

    def end(self) -> None:
        """Type Ctrl-D."""
        os.write(self._ours, b"\x04")
        self.process.wait(DEADLINE_S)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(DEADLINE_S)


def record() -> tuple[str, str]:
    """Return the output of the server until it is ready, and the conversation."""
    server = Terminal(".venv/bin/dynamo", "serve")
    try:
        server.read_until(READY)
        chat = Terminal(".venv/bin/dynamo", "chat")
        for question in QUESTIONS:
            chat.read_until(f"\n{PROMPT}")
            chat.type(question)
        chat.read_until(f"\n{PROMPT}")
        chat.end()
    finally:
        server.interrupt()
    return server.text, chat.text.removesuffix(PROMPT)


def lines_of(command: str, output: str) -> list[str]:
    """Return a command and its output as lines of a terminal of `COLUMNS` characters."""
    lines = [f"$ {command}"]
    for line in output.strip("\n").splitlines():
        lines += textwrap.wrap(line, COLUMNS, break_on_hyphens=False) or [""]
    return lines


def draw(lines: list[str]) -> str:
    """Return the lines as an SVG picture; commands and questions are highlighted."""
    width = int(COLUMNS * CHARACTER_PX + 2 * MARGIN_PX)
    height = len(lines) * LINE_PX + 2 * MARGIN_PX
    rows = []
    for number, line in enumerate(lines):
        color = "#7ee787" if line.startswith("$ ") else "#79c0ff" if line.startswith(PROMPT) else "#e6edf3"
        y = MARGIN_PX + FONT_PX + number * LINE_PX
        rows.append(f'  <text x="{MARGIN_PX}" y="{y}" fill="{color}">{escape(line)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"',
            f'     font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="{FONT_PX}" xml:space="preserve">',
            "  <title>A session with dynamo serve and dynamo chat</title>",
            f'  <rect width="{width}" height="{height}" rx="10" fill="#0d1117"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the picture."""
    server, chat = record()
    lines = [*lines_of(".venv/bin/dynamo serve", server), "", *lines_of(".venv/bin/dynamo chat", chat)]
    PICTURE.write_text(draw(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
