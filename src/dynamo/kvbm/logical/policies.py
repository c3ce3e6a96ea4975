"""Policies: the rules that select blocks for a copy in the next tier. Pure."""

from collections.abc import Sequence
from enum import Enum

from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.kvbm.logical.frequency import RepeatFilter, Sketch
from dynamo.kvbm.logical.pool import Pool


class Rule(Enum):
    """Rules, by upstream's names."""

    PASS_ALL = "pass_all"  # noqa: S105 - a rule, not a secret
    PRESENCE = "presence"
    PRESENCE_LFU = "presence_lfu"


class Policy:
    """Rules for copies from one tier to another: a block is copied if every rule passes."""

    def __init__(
        self,
        rules: Sequence[Rule],
        sketch: Sketch,
        *,
        lfu_min: int = 1,
        repeats: RepeatFilter | None = None,
    ) -> None:
        self._rules = frozenset(rules)
        self._sketch = sketch
        self._lfu_min = lfu_min
        self._repeats = repeats

    def passes(self, identity: BlockIdentity, target: Pool, now: float) -> bool:
        """Return whether the block is to be copied into `target`."""
        key = identity.sequence_hash
        if self._rules & {Rule.PRESENCE, Rule.PRESENCE_LFU} and key in target:
            return False
        if Rule.PRESENCE_LFU in self._rules and self._sketch.estimate(key) < self._lfu_min:
            return False
        return self._repeats is None or self._repeats.passes(key, now)


def worthy_prefix(identities: Sequence[BlockIdentity], priority_min: int) -> Sequence[BlockIdentity]:
    """Return the blocks before the first whose priority is too low: later blocks could not be found without it."""
    if priority_min <= 0:
        return identities
    for at, identity in enumerate(identities):
        if identity.priority < priority_min:
            return identities[:at]
    return identities
