"""Text input: a conversation in the terminal with a frontend in the same process (`run_input`, `text`).

Messages are sent over HTTP on loopback, so that the output is the same as for other clients.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TextIO

from dynamo.core.errors import DynamoException
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.core.threads import in_daemon_thread
from dynamo.http.embedded import ServedFrontend

POLL_S = 0.2
TIMEOUT_S = 600.0  # Between two pieces of an answer; the user may end the program earlier.
EXITS = frozenset({"/exit", "/quit"})

Message = dict[str, str]
Respond = Callable[[list[Message]], AsyncIterator[str]]
"""Function that yields the pieces of an answer to a conversation. Raises `DynamoException` on failure."""


async def converse(read: Callable[[], Awaitable[str]], respond: Respond, out: TextIO) -> None:
    """Converse until the input ends or is an exit command. A question without an answer is dropped."""
    messages: list[Message] = []
    while line := await read():
        text = line.strip()
        if text in EXITS:
            return
        if not text:
            continue
        conversation = [*messages, {"role": "user", "content": text}]
        reply = ""
        try:
            async for piece in respond(conversation):
                reply += piece
                out.write(piece)
                out.flush()
        except DynamoException as error:
            out.write(f"error: {error}\n")
            continue
        out.write("\n")
        out.flush()
        messages = [*conversation, {"role": "assistant", "content": reply}]


async def run_text(frontend: ServedFrontend, model: str | None, ending: asyncio.Event) -> None:
    """Converse until the input ends or the event is set. The frontend must listen on loopback, without TLS."""
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
    client = HttpClient(url, Deadlines(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S))
    while (name := await _model(client, model)) is None:  # noqa: ASYNC110 - over HTTP
        await asyncio.sleep(POLL_S)

    async def read() -> str:
        if sys.stdin.isatty():
            sys.stdout.write(f"{name}> ")
            sys.stdout.flush()
        return await in_daemon_thread(sys.stdin.readline, "input")

    try:
        await converse(read, lambda messages: answer(client, name, messages), sys.stdout)
    finally:
        client.close()


async def _model(client: HttpClient, wanted: str | None) -> str | None:
    """Return the model to use, None until there is one. By default the first one."""
    async with client.request("GET", "/v1/models") as response:
        names = [one["id"] for one in json.loads(await response.read())["data"]]
    if wanted is None:
        return names[0] if names else None
    return wanted if wanted in names else None


async def answer(client: HttpClient, model: str, messages: list[Message]) -> AsyncIterator[str]:
    """Yield the pieces of an answer as they arrive. Raise `DynamoException` with the server's message."""
    body = json.dumps({"model": model, "messages": messages, "stream": True}).encode()
    async with client.request("POST", "/v1/chat/completions", body) as response:
        if response.status != 200:
            raise DynamoException(f"{response.status}: {(await response.read()).decode(errors='replace')}")
        while (events := await response.events()) is not None:
            for event in events:
                if event.startswith(b"{"):
                    yield _piece(json.loads(event))


def _piece(chunk: dict[str, Any]) -> str:
    """Return the text of a chunk, including reasoning."""
    if "error" in chunk:
        raise DynamoException(str(chunk["error"].get("message", chunk["error"])))
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    return "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)
