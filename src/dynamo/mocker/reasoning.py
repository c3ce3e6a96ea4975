"""Reasoning: the part of an answer that is marked as thinking by a start and an end token."""

import msgspec

from dynamo.core.errors import ConfigError


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `--reasoning`."""

    start_thinking_token_id: int
    end_thinking_token_id: int
    thinking_ratio: float
    """Share of the answer between the marks, from 0 to 1."""

    def marks(self, max_tokens: int) -> dict[int, int]:
        """Return the marker tokens of an answer by their position."""
        thoughts = int(max_tokens * self.thinking_ratio)
        if thoughts < 2:
            return {}
        return {0: self.start_thinking_token_id, thoughts - 1: self.end_thinking_token_id}


def read_reasoning(text: str) -> Reasoning:
    """Parse the flag. Raise `ConfigError`."""
    try:
        found = msgspec.json.decode(text, type=Reasoning)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--reasoning: {error}") from None
    if not 0 <= found.thinking_ratio <= 1:
        raise ConfigError(f"--reasoning: thinking_ratio is {found.thinking_ratio:g}: expected 0 to 1")
    if min(found.start_thinking_token_id, found.end_thinking_token_id) < 0:
        raise ConfigError("--reasoning: expected token ids of zero or more")
    return found
