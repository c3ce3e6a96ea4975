"""Report of a client script's checks. Standard library only: it runs in the clients' own environments.

A script is called with the addresses of a frontend and of one that requires keys, and with a key that allows one
request a minute; it prints a line for each check.
"""

import asyncio
import inspect
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MODEL = "m"
"""Model that runs the script of a request."""
DEMO = "demo"
"""Small real model."""
EMBEDDER = "e"
GREETING = "Hello there."
USER: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
THOUGHT, MESSAGES = "Two and two. €😀", "Let me see."
CALLED = {"city": "Malmö 🇸🇪"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(CALLED, ensure_ascii=False)}}}\n</tool_call>'
CALLING = f"<think>{THOUGHT}</think>{MESSAGES}{CALL}"
CALLING_TWICE = CALLING + CALL.replace("Malmö", "Oslo")
GOOD_KEY, NARROW_KEY = "key-good", "key-narrow"
"""The second key allows other models only."""
PICTURE = "https://example.com/picture.png"

Check = Callable[[], Any]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a check of the script."""
    CHECKS.append(function)
    return function


def places() -> tuple[str, str, str]:
    """Return the address of the frontend, that of the one that requires keys, and the key that allows one request a
    minute.
    """
    frontend, keyed, slow_key = sys.argv[1:]
    return frontend, keyed, slow_key


def says(*texts: str, **how: Any) -> dict[str, Any]:
    """Return the additional fields of a request that make the model return these texts."""
    return {"nvext": {"annotations": ["script:" + json.dumps({"texts": list(texts), **how})]}}


def fails(how: str) -> dict[str, Any]:
    """Return the fields that make the worker fail before its first token."""
    return says("x", fails_after=0, fails_as=how)


class FailsLater:
    """A response whose worker fails once the client has read a part of it.

    A frontend that receives tokens and error at once sends the error alone, with a status of its own.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._signal = Path(self._folder.name) / "read"
        text = "many words before it ends " * 60
        self.body = says(text, fails_after=200, fails_as="Unknown", fails_when=str(self._signal))
        """Fields of the request."""

    def read(self, stream: Iterable[Any]) -> None:
        """Read a stream to its end; its first part makes the worker fail."""
        for _ in stream:
            self._signal.touch()


def raises(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the error that the call raises, of exactly that class or as the cause of a wrapping client's error."""
    try:
        call()
    except Exception as error:
        raised = error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    is_derived = isinstance(raised, kind) and type(raised).__module__ != kind.__module__
    assert type(raised) is kind or is_derived, f"{type(raised).__name__}, not {kind.__name__}: {raised}"
    return raised


def main() -> None:
    """Run every check; return the number of failures."""
    failed = 0
    for one in CHECKS:
        begun = time.monotonic()
        try:
            result = one()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except BaseException:
            failed += 1
            print(f"FAILED {one.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok {one.__name__} {time.monotonic() - begun:.2f} s", flush=True)
    print(f"{len(CHECKS)} checks, {failed} failed", flush=True)
    sys.exit(min(failed, 100))
