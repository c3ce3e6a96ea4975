"""Conversation: `dynamo chat` sends messages to a running server and streams the responses to the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from dynamo.cli.announcement import DEFAULT_URL
from dynamo.cli.client import Client, Delta, environment_key
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException

COMMANDS = """\
  /reset          delete the history
  /system TEXT    set the system prompt and delete the history; without TEXT, remove the system prompt
  /model [NAME]   switch to another model; without NAME, list the models
  /help           show this list
  /exit           quit (so does Ctrl-D; Ctrl-C interrupts a response)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Chat with a running server in this terminal; every request contains the conversation's history."""

    url: str = option(
        DEFAULT_URL, "--url", "DYN_CHAT_URL", "URL of the server; the API key in DYN_API_KEY is sent to it"
    )
    model: str | None = option(None, "--model", None, "Model to chat with; default: the first one served")
    system: str | None = option(None, "--system", None, "System prompt")
    max_tokens: int | None = option(None, "--max-tokens", None, "Maximum output tokens of a response")
    temperature: float | None = option(None, "--temperature", None, "Sampling temperature, 0 to 2; 0 is greedy")

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens}: must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ConfigError(f"--temperature {self.temperature:g}: must be from 0 to 2")


def chat(argv: list[str]) -> int:
    """Run `dynamo chat` until the input ends. Return 1 if no server can be reached."""
    config = load(ChatConfig, argv, prog="dynamo chat")
    client = Client(config.url, key=environment_key())
    try:
        model = choose_model(client.models(), config.model)
    except DynamoException as error:
        if isinstance(error, ConfigError):
            raise
        sys.stderr.write(f"error: {error}\n")
        return 1
    conversation = Conversation(client, model, config)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  Importing it gives input() editing and a history.
        print(f"{model} at {client.url}. /help lists the commands; Ctrl-D ends.")
    return conversation.run(_lines(sys.stdin), sys.stdout)


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

    def __init__(self, client: Client, model: str, config: ChatConfig) -> None:
        self._client = client
        self._model = model
        self._system = config.system
        self._options = {
            name: value
            for name, value in (("max_tokens", config.max_tokens), ("temperature", config.temperature))
            if value is not None
        }
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
            for delta in self._client.chat(self._model, self.messages, self._options):
                answer.append(delta.content)
                _show(delta, out)
        except KeyboardInterrupt:
            out.write(" [interrupted]")
        except DynamoException as error:
            # Remove a message without a response, so that the next request contains a well-formed conversation.
            self.messages.pop()
            if answer:
                out.write("\n")
            out.write(f"error: {error}\n")
            return 1
        self.messages.append({"role": "assistant", "content": "".join(answer)})
        out.write("\n")
        return 0


def _show(delta: Delta, out: TextIO) -> None:
    if delta.reasoning:
        out.write(f"\x1b[2m{delta.reasoning}\x1b[0m" if out.isatty() else delta.reasoning)
    out.write(delta.content)
    out.flush()


def _lines(stdin: TextIO) -> Iterator[str]:
    """Return lines typed at a prompt, or read from a file or a pipe."""
    if not stdin.isatty():
        yield from stdin
        return
    yield from prompted(lambda: input("> "))


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
