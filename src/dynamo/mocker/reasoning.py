"""Reasoning: the part of an answer that pretends to be thought, between two tokens that say so."""

import msgspec

from dynamo.core.errors import ConfigError


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--reasoning` says."""

    start_thinking_token_id: int
    end_thinking_token_id: int
    thinking_ratio: float
    """How much of an answer is thought, from 0 to 1."""

    def marks(self, max_tokens: int) -> dict[int, int]:
        """Which tokens of an answer are marks, by their place in it."""
        thoughts = int(max_tokens * self.thinking_ratio)
        if thoughts < 2:
            return {}
        return {0: self.start_thinking_token_id, thoughts - 1: self.end_thinking_token_id}


def read_reasoning(text: str) -> Reasoning:
    """Of the flag. Raises `ConfigError`."""
    try:
        found = msgspec.json.decode(text, type=Reasoning)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--reasoning: {error}") from None
    if not 0 <= found.thinking_ratio <= 1:
        raise ConfigError(f"--reasoning: thinking_ratio is {found.thinking_ratio:g}: expected 0 to 1")
    if min(found.start_thinking_token_id, found.end_thinking_token_id) < 0:
        raise ConfigError("--reasoning: expected token ids of zero or more")
    return found
