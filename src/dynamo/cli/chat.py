"""Chat: `dynamo chat` chats with a running server in this terminal."""

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from dynamo.core.config import load, option
from dynamo.core.errors import CannotConnect, ConfigError, DynamoException
from dynamo.core.hosts import is_loopback
from dynamo.core.progress import activity
from dynamo.http.client import ChatClient, environment_key
from dynamo.http.terminal_chat import POLL_S, PROMPT, Conversation, choose_model, read_lines
from dynamo.ops.graphs import DEFAULT_URL, find_graphs, server_url

RECORD_S = 1.5  # A `dynamo serve` started just before this command has recorded its graph by then.


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
    ready_timeout: float = option(
        30.0, "--ready-timeout", None, "Seconds to wait for a model of a server that starts; 0 does not wait"
    )

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens}: must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ConfigError(f"--temperature {self.temperature:g}: must be from 0 to 2")
        if not 0 <= self.ready_timeout < math.inf:
            raise ConfigError(f"--ready-timeout {self.ready_timeout:g}: must be a number of seconds, at least 0")


def chat(argv: list[str]) -> int:
    """Run `dynamo chat` until the input ends. Return 1 if no server can be reached, or none serves a model in time."""
    config = load(ChatConfig, argv, prog="dynamo chat")
    client = ChatClient(server_url(config.url), key=environment_key())
    try:
        model = await_model(client, config.model, config.ready_timeout)
    except DynamoException as error:
        if isinstance(error, ConfigError):
            raise
        sys.stderr.write(f"error: {error}\n")
        return 1
    limits = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    options = {name: value for name, value in limits.items() if value is not None}
    conversation = Conversation(client, model, system=config.system, options=options)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  Importing it gives input() editing and a history.
        print(f"{model} at {client.url}. /help lists the commands; Ctrl-D ends.")
    return conversation.run(read_lines(sys.stdin, lambda: input(PROMPT)), sys.stdout)


def await_model(client: ChatClient, wanted: str | None, timeout_s: float) -> str:
    """Return the model to chat with, as soon as the server lists any; show that it is awaited.

    Raise `ConfigError` if others are served than the wanted one, `CannotConnect` if no server listens or starts, and
    `DynamoException` after the timeout.
    """
    started = time.monotonic()
    with activity(f"Waiting for a model at {client.url}"):
        while True:
            waited_s = time.monotonic() - started
            try:
                served = client.models()
            except CannotConnect:
                if waited_s >= timeout_s or not may_start(client.url, waited_s):
                    raise
            else:
                if served or not timeout_s:
                    return choose_model(served, wanted)
                if waited_s >= timeout_s:
                    raise DynamoException(
                        f"no model is served at {client.url} after {timeout_s:g} s; `dynamo top` shows the workers,"
                        " --ready-timeout sets a longer wait"
                    )
            time.sleep(min(POLL_S, max(0.0, timeout_s - waited_s)))


def may_start(url: str, waited_s: float) -> bool:
    """Return whether a server may soon listen at a URL of this machine: its graph runs, or was not recorded yet."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or ""):
        return False
    ports = [urlsplit(graph.record.url).port for graph in find_graphs() if graph.is_running]
    return parts.port in ports or waited_s < RECORD_S
