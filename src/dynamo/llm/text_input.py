"""Text input: a conversation in this terminal with what a frontend of this very process serves (`run_input`, `text`).

The questions go the way that every client's go, over HTTP on loopback, so that what is seen is what clients get.
"""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TextIO

from dynamo.core.errors import DynamoException
from dynamo.core.threads import in_daemon_thread
from dynamo.http.embedded import ServedFrontend

POLL_S = 0.2
TIMEOUT_S = 600.0  # Between two pieces of an answer; a person who has had enough ends the program.
UNREAD_MAX = 10_000  # Pieces; far more than a terminal is behind.
EXITS = frozenset({"/exit", "/quit"})

Message = dict[str, str]
Ask = Callable[[list[Message]], AsyncIterator[str]]
"""The pieces of an answer to a conversation. Raises `DynamoException` for one that has none."""


async def converse(read: Callable[[], Awaitable[str]], ask: Ask, out: TextIO) -> None:
    """Question by question until the input ends or says so. A question without an answer is forgotten."""
    messages: list[Message] = []
    while line := await read():
        text = line.strip()
        if text in EXITS:
            return
        if not text:
            continue
        asked = [*messages, {"role": "user", "content": text}]
        said = ""
        try:
            async for piece in ask(asked):
                said += piece
                out.write(piece)
                out.flush()
        except DynamoException as error:
            out.write(f"error: {error}\n")
            continue
        out.write("\n")
        out.flush()
        messages = [*asked, {"role": "assistant", "content": said}]


async def run_text(frontend: ServedFrontend, model: str | None, ending: asyncio.Event) -> None:
    """Talks until the input ends or the event is set. The frontend must listen on loopback, without TLS."""
    port = await frontend.start()
    talking = asyncio.ensure_future(_talk(f"http://127.0.0.1:{port}", model))
    ended = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait({talking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if talking.done():
            talking.result()
    finally:
        for one in (talking, ended):
            one.cancel()
        await asyncio.wait({talking, ended})
        await frontend.stop()


async def _talk(url: str, model: str | None) -> None:
    while (name := await in_daemon_thread(lambda: _model(url, model), "model")) is None:  # noqa: ASYNC110 - over HTTP
        await asyncio.sleep(POLL_S)

    async def read() -> str:
        if sys.stdin.isatty():
            sys.stdout.write(f"{name}> ")
            sys.stdout.flush()
        return await in_daemon_thread(sys.stdin.readline, "input")

    await converse(read, lambda messages: answer(url, name, messages), sys.stdout)


def _model(url: str, wanted: str | None) -> str | None:
    """The model to talk to, None as long as there is none. Without a wish, the first one."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S) as response:  # noqa: S310 - our own
        names = [one["id"] for one in json.load(response)["data"]]
    if wanted is None:
        return names[0] if names else None
    return wanted if wanted in names else None


async def answer(url: str, model: str, messages: list[Message]) -> AsyncIterator[str]:
    """The pieces of an answer as they come. Raises `DynamoException` with the server's words."""
    pieces: asyncio.Queue[str] = asyncio.Queue(UNREAD_MAX)
    loop = asyncio.get_running_loop()

    def say(piece: str) -> None:
        asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result(TIMEOUT_S)

    reading = asyncio.ensure_future(in_daemon_thread(lambda: _read_answer(url, model, messages, say), "answer"))
    while True:
        getting = asyncio.ensure_future(pieces.get())
        await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            yield getting.result()
            continue
        getting.cancel()
        reading.result()
        return


def _read_answer(url: str, model: str, messages: list[Message], say: Callable[[str], None]) -> None:
    body = json.dumps({"model": model, "messages": messages, "stream": True}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 - our own
            for line in response:
                if line.startswith(b"data: {"):
                    say(_piece(json.loads(line[6:])))
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")
        raise DynamoException(f"{error.code}: {told}") from None
    except OSError as error:
        raise DynamoException(str(error)) from None


def _piece(chunk: dict[str, Any]) -> str:
    """The text of a chunk, what was thought included."""
    if "error" in chunk:
        raise DynamoException(str(chunk["error"].get("message", chunk["error"])))
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    return "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)
