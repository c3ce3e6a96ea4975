"""Chat: `dynamo chat` chats with a running server in this terminal."""

import contextlib
import sys
from dataclasses import dataclass

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, DynamoException
from dynamo.http.client import ChatClient, environment_key
from dynamo.http.terminal_chat import PROMPT, Conversation, choose_model, read_lines
from dynamo.ops.graphs import DEFAULT_URL, server_url


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
    client = ChatClient(server_url(config.url), key=environment_key())
    try:
        model = choose_model(client.models(), config.model)
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
