"""Connector: what an engine that is not ours asks of the block manager, request by request (control-plane.md §4.6).

    match      how many tokens can be loaded behind what the engine has; None: ask again, they are on their way
    allocated  the engine has made room for them: the places and the blocks of the next step's loads
    plan       what the next step loads, and which blocks it completes that are to be saved
    finished   the request is over

The engine's own hashes are not used: blocks are named by their tokens, so that engines and workers agree on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.kvbm.logical.blocks import Identity
from dynamo.tokens.hashing import block_hashes, next_sequence_hash, seed_of


class Keeper(Protocol):
    """The block manager, in this process or in another one; what its tickets are is its own affair."""

    def begin(self, identities: Sequence[Identity]) -> Any: ...
    def is_over(self, ticket: Any) -> bool: ...
    def end(self, ticket: Any) -> None: ...
    def find(self, hashes: Sequence[int]) -> list[int]: ...
    def release(self, slots: Sequence[int]) -> None: ...


class Tokens(Protocol):
    """A request as its engine knows it. Tokens are only ever added."""

    request_id: str
    all_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Save:
    """A block that the step completes."""

    identity: Identity
    block: int


@dataclass(slots=True)
class Step:
    """What a step copies: before it computes, and after."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    """Places in the host, and the engine's blocks."""
    saves: list[list[Save]] = field(default_factory=list)
    """For each sequence, consecutive blocks."""


class _Followed:
    """One request."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self.tokens = tokens
        self.seed = seed
        self.blocks: list[int] = []
        self.saved = 0
        """Blocks that are in the host, or on their way into it."""
        self.first = 0
        """The block behind the engine's own part of the prefix."""
        self.held: list[int] = []
        self.ticket: Any = None
        self.has_asked = False
        self._identities: list[Identity] = []

    def identities(self, count: int, block_tokens: int) -> list[Identity]:
        """The first so many blocks, which must be complete."""
        known = len(self._identities)
        if count > known:
            missing = self.tokens[known * block_tokens : count * block_tokens]
            parent = self._identities[-1].sequence_hash if known else None
            for tokens_hash in block_hashes(list(missing), block_tokens, self.seed):
                sequence_hash = next_sequence_hash(parent, tokens_hash)
                self._identities.append(Identity(sequence_hash, tokens_hash, parent))
                parent = sequence_hash
        return self._identities[:count]


class Tracker:
    """The scheduler's side. One thread calls it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._followed: dict[str, _Followed] = {}
        self._loads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._followed)

    def match(
        self,
        manager: Keeper,
        request: Tokens,
        computed: int,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> int | None:
        """Tokens that can be loaded behind the `computed` ones; None while they are on their way."""
        one = self._followed.get(request.request_id)
        if one is None:
            one = _Followed(request.all_token_ids, seed_of(lora_name, cache_salt))
            self._followed[request.request_id] = one
        first = one.first = computed // self._block_tokens
        end = (len(one.tokens) - 1) // self._block_tokens  # At least one token is left to compute.
        self._let_go(manager, one, is_ticket=False)
        if first >= end:
            return 0
        wanted = one.identities(end, self._block_tokens)[first:]
        if not one.has_asked:
            one.has_asked = True
            one.ticket = manager.begin(wanted)
        if one.ticket is not None and not manager.is_over(one.ticket):
            return None
        one.held = manager.find([identity.sequence_hash for identity in wanted])
        return len(one.held) * self._block_tokens

    def allocated(self, manager: Keeper, request: Tokens, blocks: Sequence[int], loaded: int) -> None:
        """The request has these blocks; so many tokens of them, behind what was computed, are to be loaded."""
        one = self._followed.setdefault(request.request_id, _Followed(request.all_token_ids, seed_of()))
        one.blocks = list(blocks)
        count = loaded // self._block_tokens
        if count and one.held:
            used, spare = one.held[:count], one.held[count:]
            first = one.first
            self._loads += zip(used, blocks[first : first + count], strict=True)
            manager.release(spare)
            one.held = []
            one.saved = max(one.saved, first + count)
        self._let_go(manager, one)
        one.has_asked = False

    def plan(
        self,
        scheduled: Mapping[str, int],
        computed: Mapping[str, int],
        more_blocks: Mapping[str, Sequence[int]],
        resumed: frozenset[str] = frozenset(),
    ) -> Step:
        """A step with so many tokens of each request, behind so many that are computed; the blocks that came since."""
        step = Step(self._loads, [])
        self._loads = []
        for request_id, blocks in more_blocks.items():
            one = self._followed.get(request_id)
            if one is not None:
                one.blocks = list(blocks) if request_id in resumed else [*one.blocks, *blocks]
        for request_id, count in scheduled.items():
            one = self._followed.get(request_id)
            if one is None:
                continue
            end = min(computed.get(request_id, 0) + count, len(one.tokens)) // self._block_tokens
            end = min(end, len(one.blocks))
            if end > one.saved:
                identities = one.identities(end, self._block_tokens)
                step.saves.append([Save(identities[at], one.blocks[at]) for at in range(one.saved, end)])
                one.saved = end
        return step

    def finished(self, manager: Keeper | None, request_id: str) -> None:
        """The request is over, however it ended."""
        one = self._followed.pop(request_id, None)
        if one is not None and manager is not None:
            self._let_go(manager, one)

    def _let_go(self, manager: Keeper, one: _Followed, *, is_ticket: bool = True) -> None:
        held, one.held = one.held, []
        manager.release(held)
        if is_ticket and one.ticket is not None:
            manager.end(one.ticket)
            one.ticket = None
