"""Connector: request-level interface of the block manager for engines outside this project.

    match      number of tokens that can be loaded after the engine's own prefix; None: loading, call again later
    allocated  the engine has allocated blocks for them: record the host slots and engine blocks of the next step's loads
    plan       the blocks to load before the next step, and the completed blocks to save after it
    finished   the request is over

The engine's own hashes are not used: blocks are identified by their tokens, so that engines and workers agree on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.kvbm.logical.blocks import BlockIdentity
from dynamo.tokens.hashing import block_hashes, next_sequence_hash, seed_of


class Keeper(Protocol):
    """The block manager, in this process or in another one; its tickets are opaque to the caller."""

    def begin(self, identities: Sequence[BlockIdentity]) -> Any: ...
    def is_over(self, ticket: Any) -> bool: ...
    def end(self, ticket: Any) -> None: ...
    def find(self, hashes: Sequence[int]) -> list[int]: ...
    def release(self, slots: Sequence[int]) -> None: ...


class Tokens(Protocol):
    """A request as represented by its engine. Tokens are only ever appended."""

    request_id: str
    all_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Save:
    """A block completed by the step."""

    identity: BlockIdentity
    block: int


@dataclass(slots=True)
class Step:
    """Copies of a step: loads before it computes, saves after it."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of host slot and engine block."""
    saves: list[list[Save]] = field(default_factory=list)
    """Consecutive blocks, one list per sequence."""


class _FollowedRequest:
    """State of one request."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self.tokens = tokens
        self.seed = seed
        self.blocks: list[int] = []
        self.saved = 0
        """Blocks that are in the host tier, or being copied into it."""
        self.first = 0
        """Index of the first block after the engine's own part of the prefix."""
        self.held: list[int] = []
        self.ticket: Any = None
        self.has_begun = False
        self._identities: list[BlockIdentity] = []

    def identities(self, count: int, block_tokens: int) -> list[BlockIdentity]:
        """Return the identities of the first `count` blocks, which must be complete."""
        known = len(self._identities)
        if count > known:
            missing = self.tokens[known * block_tokens : count * block_tokens]
            parent = self._identities[-1].sequence_hash if known else None
            for tokens_hash in block_hashes(list(missing), block_tokens, self.seed):
                sequence_hash = next_sequence_hash(parent, tokens_hash)
                self._identities.append(BlockIdentity(sequence_hash, tokens_hash, parent))
                parent = sequence_hash
        return self._identities[:count]


class Tracker:
    """Scheduler-side state of all requests. Not thread-safe: one thread calls it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._followed: dict[str, _FollowedRequest] = {}
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
        """Return the number of tokens that can be loaded after the `computed` ones; None while they are being loaded."""
        one = self._followed.get(request.request_id)
        if one is None:
            one = _FollowedRequest(request.all_token_ids, seed_of(lora_name, cache_salt))
            self._followed[request.request_id] = one
        first = one.first = computed // self._block_tokens
        end = (len(one.tokens) - 1) // self._block_tokens  # At least one token is left to compute.
        self._let_go(manager, one, is_ticket=False)
        if first >= end:
            return 0
        wanted = one.identities(end, self._block_tokens)[first:]
        if not one.has_begun:
            one.has_begun = True
            one.ticket = manager.begin(wanted)
        if one.ticket is not None and not manager.is_over(one.ticket):
            return None
        one.held = manager.find([identity.sequence_hash for identity in wanted])
        return len(one.held) * self._block_tokens

    def allocated(self, manager: Keeper, request: Tokens, blocks: Sequence[int], loaded: int) -> None:
        """Record the blocks of a request; the first `loaded` tokens after the computed ones are to be loaded."""
        one = self._followed.setdefault(request.request_id, _FollowedRequest(request.all_token_ids, seed_of()))
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
        one.has_begun = False

    def plan(
        self,
        scheduled: Mapping[str, int],
        computed: Mapping[str, int],
        more_blocks: Mapping[str, Sequence[int]],
        resumed: frozenset[str] = frozenset(),
    ) -> Step:
        """Plan a step, given each request's scheduled and computed token counts and its newly allocated blocks."""
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
        """Drop the state of a request that finished, failed or was cancelled."""
        one = self._followed.pop(request_id, None)
        if one is not None and manager is not None:
            self._let_go(manager, one)

    def _let_go(self, manager: Keeper, one: _FollowedRequest, *, is_ticket: bool = True) -> None:
        held, one.held = one.held, []
        manager.release(held)
        if is_ticket and one.ticket is not None:
            manager.end(one.ticket)
            one.ticket = None
