"""Conversion between the relay's state and the messages of its protocol. Pure."""

from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.dc_relay.cuckoo_filter import FINGERPRINT_BITS, FORMAT_VERSION, SEED, SLOTS_PER_BUCKET
from dynamo.dc_relay.host import CatalogEntry, LoadWindow, RelayHost
from dynamo.dc_relay.membership import DIGEST_BYTES, PoolKey, PoolRegistration, ReadinessEntry
from dynamo.dc_relay.messages import CLASSES, CONTRACT_MARKER, IDENTITY_VERSION, PROTOCOL_VERSION, number_of
from dynamo.protocols.discovery import EndpointId

DERIVED = number_of("IdentitySource", "DEFAULT_DERIVED")


class UnsupportedIdentity(InvalidArgument):
    """A producer identity of another version or filter format."""


class RelayConversion:
    """Messages of one relay."""

    def __init__(self, host: RelayHost) -> None:
        self._host = host
        self._relay = CLASSES["RelayIdentity"](drt_instance_id=host.instance_id, relay_incarnation=host.incarnation)

    def response(self, name: str, **fields: Any) -> Any:
        """Return a response with the envelope's fields."""
        return CLASSES[name](
            protocol_version=PROTOCOL_VERSION, relay=self._relay, contract_marker=CONTRACT_MARKER, **fields
        )

    def catalog(self) -> Any:
        """Return the present catalog."""
        published = self._host.catalog
        pools = [self._descriptor(entry) for entry in published.value]
        snapshot = CLASSES["KvPoolCatalogSnapshot"](pools=pools)
        return self.response("KvPoolCatalogUpdate", revision=published.revision, snapshot=snapshot)

    def readiness(self) -> Any:
        """Return the present readiness."""
        published = self._host.readiness
        entries = [self._entry(entry) for entry in published.value]
        return self.response("ServingReadinessUpdate", revision=published.revision, entries=entries)

    def load(self, number: int, window: LoadWindow) -> Any:
        """Return one window of loads."""
        pools = [
            CLASSES["KvPoolLoadEntry"](
                producer=self.producer(entry),
                kv_used_blocks=load.kv_used_blocks,
                total_kv_blocks=entry.plan.total_kv_blocks,
                kv_observed_ranks=load.observed_ranks,
                kv_expected_ranks=len(entry.plan.ranks),
            )
            for entry, load in window.pools
        ]
        return self.response(
            "KvPoolLoadUpdate",
            window_sequence=number,
            observed_ms=window.observed_ms,
            window_ms=self._host.config.limits.load_window_ms,
            pools=pools,
        )

    def producer(self, entry: CatalogEntry) -> Any:
        """Return the identity of a pool's generation."""
        return CLASSES["ProducerIdentity"](
            pool_id=self.pool_id(entry.plan.key),
            producer_incarnation=self._host.incarnation,
            layout_generation=entry.generation,
            ckf_format=CLASSES["CkfFormat"](
                format_version=FORMAT_VERSION,
                seed=SEED,
                bucket_count=self._host.config.bucket_count,
                fingerprint_bits=FINGERPRINT_BITS,
                slots_per_bucket=SLOTS_PER_BUCKET,
            ),
        )

    def pool_id(self, key: PoolKey) -> Any:
        """Return the stable identity of a pool."""
        digest = CLASSES["DigestIdentity"]
        domain = CLASSES["IndexerDomainId"](
            cache_semantics=digest(digest=key.cache_semantics, source=DERIVED),
            routing_scope=digest(digest=key.routing_scope, source=DERIVED),
        )
        return CLASSES["KvPoolId"](identity_version=IDENTITY_VERSION, indexer_domain=domain, dc_id=self._host.dc_id)

    def _descriptor(self, entry: CatalogEntry) -> Any:
        plan = entry.plan
        hash_format = "DYNAMO_EAGLE_V1" if plan.is_eagle else "DYNAMO_STANDARD_V1"
        return CLASSES["KvPoolDescriptor"](
            producer=self.producer(entry),
            serving_endpoint=_endpoint(plan.endpoint),
            registrations=[_registration(one) for one in plan.registrations],
            query_semantics=CLASSES["KvQuerySemantics"](
                kv_block_size=plan.block_size, hash_format=number_of("KvQueryHashFormat", hash_format)
            ),
            pool_roles=_roles(plan.roles),
        )

    def _entry(self, entry: ReadinessEntry) -> Any:
        members = [
            CLASSES["TopologyMember"](
                endpoint=_endpoint(endpoint),
                roles=_roles(roles),
                pool_id=self.pool_id(key) if key is not None else None,
            )
            for endpoint, roles, key in entry.members
        ]
        adapters = [
            CLASSES["AdapterReadiness"](
                canonical_model_id=adapter.name,
                state=_state(adapter.state),
                missing_roles=_roles(adapter.missing_roles),
            )
            for adapter in entry.adapters
        ]
        return CLASSES["TopologyEntry"](
            namespace=entry.namespace,
            canonical_model_id=entry.name,
            state=_state(entry.state),
            present_roles=_roles(entry.present_roles),
            missing_roles=_roles(entry.missing_roles),
            members=members,
            duplicate_role_endpoints=_roles(entry.duplicate_roles),
            legacy_fallback_active=entry.is_legacy,
            adapters=adapters,
        )


def check_producer(producer: Any) -> None:
    """Raise `InvalidArgument` for a malformed identity, `UnsupportedIdentity` for one of another version."""
    pool_id, ckf = producer.pool_id, producer.ckf_format
    if pool_id.identity_version != IDENTITY_VERSION:
        raise UnsupportedIdentity(f"identity_version {pool_id.identity_version}: must be {IDENTITY_VERSION}")
    for name in ("cache_semantics", "routing_scope"):
        length = len(getattr(pool_id.indexer_domain, name).digest)
        if length != DIGEST_BYTES:
            raise InvalidArgument(f"{name} of {length} bytes: must have {DIGEST_BYTES}")
    given = (ckf.format_version, ckf.fingerprint_bits, ckf.slots_per_bucket)
    if given != (FORMAT_VERSION, FINGERPRINT_BITS, SLOTS_PER_BUCKET):
        raise UnsupportedIdentity(f"ckf_format {given}: must be {(FORMAT_VERSION, FINGERPRINT_BITS, SLOTS_PER_BUCKET)}")


def _endpoint(endpoint: EndpointId) -> Any:
    return CLASSES["DynamoEndpointId"](
        namespace=endpoint.namespace, component=endpoint.component, endpoint=endpoint.name
    )


def _registration(one: PoolRegistration) -> Any:
    if one.adapter is None:
        target = CLASSES["ModelTarget"](base=CLASSES["BaseModelTarget"](base_model=one.base_model))
    else:
        lora = CLASSES["LoraModelTarget"](base_model=one.base_model, adapter=one.adapter)
        target = CLASSES["ModelTarget"](lora=lora)
    return CLASSES["ModelRegistration"](canonical_model_id=one.name, target=target, aliases=one.aliases)


def _roles(roles: tuple[str, ...]) -> list[int]:
    return [number_of("WorkerRole", role.upper()) for role in roles]


def _state(state: str) -> int:
    return number_of("ServingReadinessState", state)
