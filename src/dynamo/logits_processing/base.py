"""BaseLogitsProcessor: the interface of logits processors."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """A callable that changes logits, a torch tensor with one value per token id, in place."""

    def __call__(self, input_ids: Sequence[int], logits: Any) -> None: ...
