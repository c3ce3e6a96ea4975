"""Terminal chat: sends each line of the terminal to a server and streams the responses.

Used by `dynamo chat`, by the frontend's `--interactive` and by `run_input` of upstream's Python API.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from dynamo.core.errors import ConfigError, DynamoException
from dynamo.core.threads import in_daemon_thread
from dynamo.http.client import ChatClient, Delta

RESPONSE_TIMEOUT_S = 600.0  # Between two pieces of a response of this process; the user may end it earlier.
POLL_S = 0.2
PROMPT = "> "
LIMIT_REQUIRED = "`max_tokens`) is required"  # In the error of a worker that has no default, such as the mocker.
LIMIT_TOKENS = 256  # Output tokens of a response from such a worker.

COMMANDS = """\
  /reset          delete the history
  /system TEXT    set the system prompt and delete the history; without TEXT, remove the system prompt
  /model [NAME]   switch to another model; without NAME, list the models
  /help           show this list
  /exit           quit (so does Ctrl-D; Ctrl-C interrupts a response)"""


def choose_model(served: list[str], wanted: str | None) -> str:
    """Return the model to chat with. Raises `ConfigError` if it is not served."""
    if not served:
        raise DynamoException("no model is served yet; wait until a worker has registered")
    if wanted is None:
        return served[0]
    if wanted not in served:
        raise ConfigError(f"--model {wanted!r}: not served; expected one of {', '.join(served)}")
    return wanted


class Conversation:
    """The history of a chat, and the effect of each line of input."""

    def __init__(
        self,
        client: ChatClient,
        model: str | None = None,
        *,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Without `model`, each message is sent to the first model served; `options` are fields of every request."""
        self._client = client
        self._model = model
        self._system = system
        self._options = dict(options or {})
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Delete all messages except the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def run(self, lines: Iterator[str], out: TextIO) -> int:
        """Answer each line until the input ends or `/exit`. Return 1 if the last message got no response."""
        status = 0
        for line in lines:
            text = line.strip()
            if text in {"/exit", "/quit"}:
                break
            if text.startswith("/"):
                out.write(f"{self.command(text)}\n")
            elif text:
                status = self._answer(text, out)
            out.flush()
        return status

    def command(self, text: str) -> str:
        """Execute a line that begins with a slash and return the message for the user."""
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if word == "/reset":
            self.reset()
            return "History deleted."
        if word == "/system":
            self._system = rest or None
            self.reset()
            return f"System prompt {'set' if rest else 'removed'}; history deleted."
        if word == "/model":
            return self._choose(rest)
        return COMMANDS if word == "/help" else f"unknown command {word}. Commands:\n{COMMANDS}"

    def _choose(self, name: str) -> str:
        try:
            served = self._client.models()
            if not name:
                return "\n".join(f"{'*' if model == self._model else ' '} {model}" for model in served)
            self._model = choose_model(served, name)
        except DynamoException as error:
            return f"error: {error}"
        return f"Switched to {self._model}."

    def _answer(self, question: str, out: TextIO) -> int:
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            model = self._model or choose_model(self._client.models(), None)
            for delta in self._deltas(model):
                answer.append(delta.content)
                _show(delta, out)
        except KeyboardInterrupt:
            out.write(" [interrupted]")
        except (DynamoException, ValueError) as error:
            # Remove a message without a response, so that the next request contains a well-formed conversation.
            self.messages.pop()
            if answer:
                out.write("\n")
            out.write(f"error: {error}\n")
            return 1
        self.messages.append({"role": "assistant", "content": "".join(answer)})
        out.write("\n")
        return 0

    def _deltas(self, model: str) -> Iterator[Delta]:
        """Stream the response; from a worker that requires a limit of output tokens, with one."""
        try:
            yield from self._client.chat(model, self.messages, self._options)
        except DynamoException as error:
            if "max_tokens" in self._options or LIMIT_REQUIRED not in str(error):
                raise
            sys.stderr.write(
                f"({model} requires a limit: {LIMIT_TOKENS} output tokens; --max-tokens sets another one)\n"
            )
            self._options["max_tokens"] = LIMIT_TOKENS
            yield from self._client.chat(model, self.messages, self._options)


def _show(delta: Delta, out: TextIO) -> None:
    if delta.reasoning:
        out.write(f"\x1b[2m{delta.reasoning}\x1b[0m" if out.isatty() else delta.reasoning)
    out.write(delta.content)
    out.flush()


def read_lines(stdin: TextIO, read: Callable[[], str]) -> Iterator[str]:
    """Return lines of a file or a pipe; those of a terminal from `read`, which shows the prompt."""
    return prompted(read) if stdin.isatty() else iter(stdin)


def prompted(read: Callable[[], str]) -> Iterator[str]:
    """Yield lines from `read` until the end of input; an interrupt drops the current line."""
    while True:
        try:
            yield read()
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)")
        except EOFError:
            print()
            return


async def converse(url: str, model: str | None, prompt: str = PROMPT) -> None:
    """Chat with a server of this process in a thread, so that the terminal does not block the loop.

    The thread ends with the process.
    """
    conversation = Conversation(ChatClient(url, RESPONSE_TIMEOUT_S), model)
    lines = read_lines(sys.stdin, lambda: _read_line(prompt))
    await in_daemon_thread(lambda: conversation.run(lines, sys.stdout), "terminal chat")


async def wait_for_model(url: str, wanted: str | None) -> str:
    """Return the model to chat with, as soon as the server lists it; by default the first one."""
    client = ChatClient(url, RESPONSE_TIMEOUT_S)
    while True:
        served = await in_daemon_thread(client.models, "model")
        if served and (wanted is None or wanted in served):
            return wanted or served[0]
        await asyncio.sleep(POLL_S)


def _read_line(prompt: str) -> str:
    """Read a line from the terminal, without `input`: an abandoned thread would leave the terminal in raw mode."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
