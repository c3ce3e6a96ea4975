"""Records: the model cards, instances and event sources of the registry, and the facts of the selected endpoints."""

import logging
from collections.abc import Callable
from typing import Any

from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.dc_relay.membership import CardRecord, MembershipFacts, Rank
from dynamo.kv_events.worker_publishers import KV_EVENTS_TOPIC
from dynamo.protocols.discovery import EVENT_SOURCES, INSTANCES, MODEL_CARDS, EndpointId, EventSource, Instance
from dynamo.runtime.discovery.base import Change, Delete, Put, Synced

logger = logging.getLogger(__name__)

BUCKETS = (MODEL_CARDS, INSTANCES, EVENT_SOURCES)
_KV_EVENTS_PART = f"/topic/{KV_EVENTS_TOPIC}/"

_decode_card = json_decoder(CardRecord).decode
_decode_instance = json_decoder(Instance).decode
_decode_source = json_decoder(EventSource).decode


def _instance_of(value: bytes) -> tuple[EndpointId, int]:
    instance = _decode_instance(value)
    return instance.endpoint_id, instance.instance_id


def _source_of(value: bytes) -> tuple[EndpointId, Rank]:
    metadata = _decode_source(value).metadata
    return metadata.kv_state_endpoint, (metadata.worker.worker_id, metadata.worker.dp_rank)


class RelayRecords:
    """Records by bucket and key. Records of other kinds are ignored."""

    def __init__(self) -> None:
        self._cards: dict[str, CardRecord] = {}
        self._instances: dict[str, tuple[EndpointId, int]] = {}
        self._sources: dict[str, tuple[EndpointId, Rank]] = {}
        self._synced: set[str] = set()
        self._buckets: dict[str, tuple[dict[str, Any], Callable[[bytes], Any]]] = {
            MODEL_CARDS: (self._cards, _decode_card),
            INSTANCES: (self._instances, _instance_of),
            EVENT_SOURCES: (self._sources, _source_of),
        }

    @property
    def namespaces(self) -> frozenset[str]:
        """Namespaces that have a model."""
        return frozenset(card.namespace for card in self._cards.values())

    def begin(self, bucket: str) -> set[str]:
        """Return the keys of a bucket before its records are listed again."""
        return set(self._buckets[bucket][0])

    def apply(self, bucket: str, change: Change, unconfirmed: set[str]) -> None:
        """Apply a change. `unconfirmed`: keys that are removed at the end of a listing unless it contains them."""
        records, decode = self._buckets[bucket]
        if isinstance(change, Synced):
            self._synced.add(bucket)
            for key in unconfirmed:
                records.pop(key, None)
            unconfirmed.clear()
            return
        unconfirmed.discard(change.key)
        if bucket == EVENT_SOURCES and _KV_EVENTS_PART not in change.key:
            return
        if isinstance(change, Delete):
            records.pop(change.key, None)
            return
        assert isinstance(change, Put)
        try:
            records[change.key] = decode(change.value)
        except UNREADABLE as error:
            records.pop(change.key, None)
            logger.warning("malformed record %s/%s: %s", bucket, change.key, error)

    def facts(self, is_selected: Callable[[EndpointId], bool]) -> MembershipFacts:
        """Return the facts of the endpoints for which `is_selected` is true."""
        cards: dict[EndpointId, list[CardRecord]] = {}
        for _, card in sorted(self._cards.items()):
            if is_selected(card.endpoint_id):
                cards.setdefault(card.endpoint_id, []).append(card)
        instances: dict[EndpointId, set[int]] = {}
        for endpoint, instance_id in self._instances.values():
            instances.setdefault(endpoint, set()).add(instance_id)
        sources: dict[EndpointId, set[Rank]] = {}
        for endpoint, rank in self._sources.values():
            sources.setdefault(endpoint, set()).add(rank)
        return MembershipFacts(
            cards,
            {endpoint: frozenset(ids) for endpoint, ids in instances.items()},
            {endpoint: frozenset(ranks) for endpoint, ranks in sources.items()},
            INSTANCES in self._synced,
        )
