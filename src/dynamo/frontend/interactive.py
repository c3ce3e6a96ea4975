"""Interactive: `--interactive` chats in this terminal over the frontend's own HTTP API."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import TextIO

from dynamo.core.threads import in_daemon_thread

ANSWER_S = 600.0
PROMPT = "> "


class Conversation:
    """The messages of one chat."""

    def __init__(self, url: str, model: str | None) -> None:
        self._url = url
        self._model = model
        self._messages: list[dict[str, str]] = []

    def run(self, lines: Iterable[str], out: TextIO) -> None:
        """Answer each line until the input ends. Errors are printed, and the next line is sent as usual."""
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if not text:
                continue
            self._messages.append({"role": "user", "content": text})
            try:
                self._messages.append({"role": "assistant", "content": self._answer(out)})
            except (OSError, ValueError, LookupError) as error:
                self._messages.pop()
                out.write(f"error: {_why(error)}\n")
            out.flush()

    def _answer(self, out: TextIO) -> str:
        """Stream the model's response. Raises `OSError`, or `ValueError` for an invalid response."""
        body = {"model": self._model or self._first_model(), "messages": self._messages, "stream": True}
        request = urllib.request.Request(  # noqa: S310 - our own address
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        pieces: list[str] = []
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    pieces.append(text)
                    out.write(text)
                    out.flush()
        out.write("\n")
        return "".join(pieces)

    def _first_model(self) -> str:
        with urllib.request.urlopen(f"{self._url}/v1/models", timeout=ANSWER_S) as answer:  # noqa: S310
            models = json.load(answer)["data"]
        if not models:
            raise ValueError("no model is served yet")
        return str(models[0]["id"])


async def converse(port: int, model: str | None, ended: Callable[[], None]) -> None:
    """Run the chat in its own thread, so that reading the terminal does not block the loop; then call `ended`."""
    conversation = Conversation(f"http://127.0.0.1:{port}", model)
    try:
        await in_daemon_thread(lambda: conversation.run(_lines(sys.stdin), sys.stdout), "interactive")
    finally:
        ended()


def _lines(source: TextIO) -> Iterable[str]:
    while True:
        if source.isatty():
            sys.stdout.write(PROMPT)
            sys.stdout.flush()
        line = source.readline()
        if not line:
            return
        yield line


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return f"status {error.code}"
    return str(error)
