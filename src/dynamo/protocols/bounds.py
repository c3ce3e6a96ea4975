"""RequestBounds: maximum number of entries and characters of the lists and texts of a request.

The limits bound the work that one request causes before it reaches a worker. Each error names the field, the value seen
and the limit; limits that deployments may need to change can be set by an environment variable.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.protocols.strict import INVALID

MESSAGES_VARIABLE = "DYN_HTTP_MAX_MESSAGES"
TOKENS_VARIABLE = "DYN_HTTP_MAX_PROMPT_TOKENS"
TEXT_VARIABLE = "DYN_HTTP_TEXT_LIMIT_MB"
STOP_VARIABLE = "DYN_HTTP_MAX_STOP_CHARS"
VARIABLES = (MESSAGES_VARIABLE, TOKENS_VARIABLE, TEXT_VARIABLE, STOP_VARIABLE)

TOOLS_MAX = 2048  # OpenAI allows 128.
TOKEN_IDS_MAX = 1 << 18  # In stop_token_ids, allowed_token_ids and logit_bias: the size of the largest vocabularies.
OBJECTS_MAX = 1 << 17  # Objects and lists in a whole body; a conversation has four per message.
ENTRIES_MAX = 1024  # In lists of names, such as annotations.


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The limits of a request."""

    messages: int = 16_384
    """Maximum number of messages, and of parts of messages."""
    prompt_tokens: int = 1 << 20
    """Maximum number of token ids of all prompts."""
    text_chars: int = 16 << 20
    """Maximum characters of all messages or prompts, without media: about four million tokens."""
    stop_chars: int = 4096
    """Maximum characters of each stop sequence."""

    @classmethod
    def from_environment(cls) -> "RequestBounds":
        """Return the limits that the environment sets. Raise `ConfigError`."""
        own = cls()
        return cls(
            messages=_positive(MESSAGES_VARIABLE, own.messages),
            prompt_tokens=_positive(TOKENS_VARIABLE, own.prompt_tokens),
            text_chars=_positive(TEXT_VARIABLE, own.text_chars >> 20) << 20,
            stop_chars=_positive(STOP_VARIABLE, own.stop_chars),
        )


@functools.cache
def request_bounds() -> RequestBounds:
    """Return the limits of this process, read once."""
    return RequestBounds.from_environment()


def check_count(values: Sequence[Any] | dict[Any, Any] | None, most: int, field: str, variable: str = "") -> None:
    """Raise `InvalidArgument` for a list with more entries than are allowed."""
    if values is not None and len(values) > most:
        refuse_count(len(values), most, field, "entries", variable)


def refuse_count(seen: int, most: int, field: str, unit: str, variable: str = "") -> NoReturn:
    """Raise `InvalidArgument` for a count above its maximum."""
    hint = f" ({variable})" if variable else ""
    raise InvalidArgument(f"{INVALID}{field} has {seen} {unit}; at most {most} are allowed{hint}", param=field)


def _positive(variable: str, default: int) -> int:
    value: int = setting(variable, default, int)
    if value < 1:
        raise ConfigError(f"{variable}={value}: must be at least 1")
    return value
