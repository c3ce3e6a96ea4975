"""Membership: endpoints, their pools and the readiness of their models, derived from discovery records. Pure.

A pool needs one kind of cached block (model, block size, hash format), one endpoint whose events describe it, and at
least one rank that publishes KV events. Readiness follows the frontend: every role that a card declares or needs has a
live worker somewhere in the namespace; a card without a role disables this check.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from dynamo.protocols.discovery import EndpointId

PREFILL, DECODE, ENCODE, AGGREGATED, LEGACY = "prefill", "decode", "encode", "aggregated", "legacy"
ADAPTER_ROLES = frozenset({PREFILL, DECODE, AGGREGATED})
DIGEST_BYTES = 16

Rank = tuple[int, int]


class CardRuntime(msgspec.Struct, kw_only=True):
    """Capacities on a card."""

    total_kv_blocks: int | None = None
    data_parallel_start_rank: int = 0
    data_parallel_size: int = 1
    enable_eagle: bool = False
    kv_state_endpoint: Any = None


class RelayCard(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of a model card that the relay uses; a card of an older worker has no role."""

    display_name: str
    source_path: str | None = None
    kv_cache_block_size: int = 0
    worker_type: str | None = None
    needs: list[list[str]] = []
    lora: dict[str, Any] | None = None
    aliases: list[str] | None = None
    runtime_config: CardRuntime = msgspec.field(default_factory=CardRuntime)

    @property
    def role(self) -> str:
        return self.worker_type or LEGACY

    @property
    def ranks(self) -> range:
        first = self.runtime_config.data_parallel_start_rank
        return range(first, first + self.runtime_config.data_parallel_size)


class CardRecord(msgspec.Struct, kw_only=True, frozen=True):
    """Discovery record of a card."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    card_json: RelayCard

    @property
    def endpoint_id(self) -> EndpointId:
        return EndpointId(self.namespace, self.component, self.endpoint)


@dataclass(frozen=True, slots=True, order=True)
class PoolRegistration:
    """A model or an adapter of an endpoint."""

    name: str
    base_model: str
    adapter: str | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Identity of a pool's blocks: digests of their kind and of the endpoint."""

    cache_semantics: bytes
    routing_scope: bytes


@dataclass(frozen=True, slots=True)
class RelayPoolPlan:
    """A pool that should exist."""

    key: PoolKey
    endpoint: EndpointId
    state_endpoint: EndpointId
    registrations: tuple[PoolRegistration, ...]
    block_size: int
    is_eagle: bool
    roles: tuple[str, ...]
    ranks: frozenset[Rank]
    total_kv_blocks: int
    """Sum over the ranks; 0 if the capacity of one is unknown."""


class Readiness(StrEnum):
    """Whether requests for a model can be served."""

    UNKNOWN = "UNKNOWN"
    UNAVAILABLE = "UNAVAILABLE"
    READY = "READY"


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """Readiness of one adapter."""

    name: str
    state: Readiness
    missing_roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadinessEntry:
    """Readiness of one model in one namespace."""

    namespace: str
    name: str
    state: Readiness
    present_roles: tuple[str, ...]
    missing_roles: tuple[str, ...]
    members: tuple[tuple[EndpointId, tuple[str, ...], PoolKey | None], ...]
    duplicate_roles: tuple[str, ...]
    is_legacy: bool
    adapters: tuple[AdapterEntry, ...]


@dataclass(frozen=True, slots=True)
class MembershipFacts:
    """Discovery records of the selected endpoints."""

    cards: Mapping[EndpointId, Collection[CardRecord]] = field(default_factory=dict)
    instances: Mapping[EndpointId, frozenset[int]] = field(default_factory=dict)
    sources: Mapping[EndpointId, frozenset[Rank]] = field(default_factory=dict)
    """Ranks that publish KV events, by the endpoint whose state they describe."""
    is_complete: bool = True
    """Whether the instances have been listed completely."""


def plan_of(endpoint: EndpointId, facts: MembershipFacts) -> RelayPoolPlan | None:
    """Return the pool of an endpoint, None if it cannot have one now."""
    cards = [record.card_json for record in facts.cards.get(endpoint, ())]
    bases = [card for card in cards if card.lora is None]
    kinds = {_kind(card) for card in bases}
    states = {_state_endpoint(card, endpoint) for card in bases}
    if len(kinds) != 1 or len(states) != 1:
        return None
    block_size, is_eagle = bases[0].kv_cache_block_size, bases[0].runtime_config.enable_eagle
    state_endpoint = states.pop()
    if state_endpoint is None or block_size < 1:
        return None
    records = [record for record in facts.cards[endpoint] if record.card_json.lora is None]
    ranks = frozenset((record.instance_id, rank) for record in records for rank in record.card_json.ranks)
    if not ranks & facts.sources.get(state_endpoint, frozenset()):
        return None
    capacities = [card.runtime_config.total_kv_blocks or 0 for card in bases for _ in card.ranks]
    return RelayPoolPlan(
        PoolKey(_digest(*kinds.pop()), _digest("endpoint", str(endpoint))),
        endpoint,
        state_endpoint,
        registrations_of(cards),
        block_size,
        is_eagle,
        tuple(sorted({card.role for card in bases})),
        ranks,
        sum(capacities) if all(capacities) else 0,
    )


def registrations_of(cards: Iterable[RelayCard]) -> tuple[PoolRegistration, ...]:
    """Return the models of an endpoint's cards: the base models, then their adapters."""
    bases = {card.display_name: card for card in cards if card.lora is None}
    found = {
        PoolRegistration(name, name, None, tuple(sorted(set(card.aliases or ()) - {name})))
        for name, card in bases.items()
    }
    if len(bases) == 1:  # Otherwise the base of an adapter is ambiguous.
        (base,) = bases
        found |= {
            PoolRegistration(card.display_name, base, str((card.lora or {}).get("name") or card.display_name))
            for card in cards
            if card.lora is not None
        }
    return tuple(sorted(found, key=lambda one: (one.adapter is not None, one.name)))


def entries_of(facts: MembershipFacts, pools: Mapping[EndpointId, PoolKey]) -> tuple[ReadinessEntry, ...]:
    """Return the readiness of every model, by namespace and name."""
    members: dict[tuple[str, str], list[EndpointId]] = {}
    for endpoint, records in facts.cards.items():
        for name in {record.card_json.display_name for record in records if record.card_json.lora is None}:
            members.setdefault((endpoint.namespace, name), []).append(endpoint)
    return tuple(_entry(*key, sorted(members[key], key=str), facts, pools) for key in sorted(members))


def _entry(
    namespace: str, name: str, endpoints: list[EndpointId], facts: MembershipFacts, pools: Mapping[EndpointId, PoolKey]
) -> ReadinessEntry:
    records = [
        record
        for endpoint in endpoints
        for record in facts.cards[endpoint]
        if record.card_json.display_name == name and record.card_json.lora is None
    ]
    declared = {
        endpoint: tuple(sorted({record.card_json.role for record in records if record.endpoint_id == endpoint}))
        for endpoint in endpoints
    }
    present, missing, state = _evaluate(records, facts)
    is_legacy = any(record.card_json.worker_type is None for record in records)
    counts = [role for roles in declared.values() for role in roles]
    return ReadinessEntry(
        namespace,
        name,
        state,
        present,
        missing,
        tuple((endpoint, declared[endpoint], pools.get(endpoint)) for endpoint in endpoints),
        tuple(role for role in (PREFILL, DECODE) if counts.count(role) > 1),
        is_legacy,
        _adapters(endpoints, facts, state, present),
    )


def _evaluate(records: list[CardRecord], facts: MembershipFacts) -> tuple[tuple[str, ...], tuple[str, ...], Readiness]:
    """Return the present roles, the missing roles and the state of one model."""
    if not facts.is_complete:
        return (), (), Readiness.UNKNOWN
    live = [record for record in records if record.instance_id in facts.instances.get(record.endpoint_id, frozenset())]
    present = {record.card_json.role for record in live} - {LEGACY}
    if any(record.card_json.worker_type is None for record in records):
        return tuple(sorted(present)), (), Readiness.READY if live else Readiness.UNAVAILABLE
    missing = {record.card_json.role for record in records} - present
    for record in live:
        needs = [set(group) for group in record.card_json.needs]
        if needs and not any(group <= present for group in needs):
            missing |= min((group - present for group in needs), key=lambda group: (len(group), sorted(group)))
    state = Readiness.READY if live and not missing else Readiness.UNAVAILABLE
    return tuple(sorted(present)), tuple(sorted(missing)), state


def _adapters(
    endpoints: list[EndpointId], facts: MembershipFacts, state: Readiness, present: tuple[str, ...]
) -> tuple[AdapterEntry, ...]:
    """Return the readiness of the adapters: each role of the base that serves adapters must have it."""
    holders: dict[str, set[str]] = {}
    for endpoint in endpoints:
        roles = {record.instance_id: record.card_json.role for record in facts.cards[endpoint]}
        for record in facts.cards[endpoint]:
            if record.card_json.lora is not None:
                holders.setdefault(record.card_json.display_name, set()).add(roles[record.instance_id])
    found = []
    for name, roles_with in sorted(holders.items()):
        missing = tuple(sorted((set(present) & ADAPTER_ROLES) - roles_with)) if state is not Readiness.UNKNOWN else ()
        ready = Readiness.UNAVAILABLE if missing else state
        found.append(AdapterEntry(name, ready, missing))
    return tuple(found)


def _kind(card: RelayCard) -> tuple[str, str, str]:
    hash_format = "eagle" if card.runtime_config.enable_eagle else "standard"
    return card.source_path or card.display_name, str(card.kv_cache_block_size), hash_format


def _state_endpoint(card: RelayCard, endpoint: EndpointId) -> EndpointId | None:
    """Return the endpoint whose events describe a card's blocks; None if the card names one that is malformed."""
    given = card.runtime_config.kv_state_endpoint
    if given is None:
        return endpoint
    try:
        return EndpointId.parse(given) if isinstance(given, str) else msgspec.convert(given, EndpointId)
    except (ValueError, msgspec.ValidationError):
        return None


def _digest(*parts: str) -> bytes:
    """Return a digest of texts, each preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()[:DIGEST_BYTES]
