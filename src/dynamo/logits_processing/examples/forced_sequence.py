"""A logits processor that forces a sequence of tokens."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from dynamo.logits_processing.base import BaseLogitsProcessor


class ForcedSequenceLogitsProcessor(BaseLogitsProcessor):
    """Processor that permits the given tokens only, one per step, then the end of the sequence."""

    def __init__(self, token_ids: Sequence[int], eos_token_id: int) -> None:
        if eos_token_id is None:
            raise ValueError("eos_token_id is None: the sequence could not end")
        self._permitted = chain(token_ids, repeat(eos_token_id))

    def __call__(self, input_ids: Sequence[int], scores: Any) -> None:
        """Set all logits but that of the next token to minus infinity."""
        token = next(self._permitted)
        kept = scores[token].item()
        scores.fill_(float("-inf"))
        scores[token] = kept
