"""Messages: the wire types of `dynamo.kvrelay.v1`, version 1 of the protocol."""

from typing import Any

from dynamo.grpc.message_tables import classes_of, file_of

PACKAGE = "dynamo.kvrelay.v1"
SERVICE = f"{PACKAGE}.KvEventRelay"
PROTOCOL_VERSION = 1
CONTRACT_MARKER = 0x4B56_5231  # "KVR1", in every request and response
IDENTITY_VERSION = 1

ENUMS = {
    "RelayErrorReason": (
        "RELAY_ERROR_REASON_UNSPECIFIED",
        "RELAY_ERROR_REASON_CONTRACT_MISMATCH",
        "RELAY_ERROR_REASON_INVALID_REQUEST",
        "RELAY_ERROR_REASON_UNSUPPORTED_FEATURE",
        "RELAY_ERROR_REASON_POOL_NOT_FOUND",
        "RELAY_ERROR_REASON_PRODUCER_CHANGED",
        "RELAY_ERROR_REASON_RESOURCE_LIMIT",
        "RELAY_ERROR_REASON_SUBSCRIBER_LAGGED",
        "RELAY_ERROR_REASON_SNAPSHOT_PROGRESS_TIMEOUT",
        "RELAY_ERROR_REASON_PUBLICATION_UNAVAILABLE",
        "RELAY_ERROR_REASON_INVALID_PUBLICATION",
        "RELAY_ERROR_REASON_INTERNAL",
    ),
    "IdentitySource": (
        "IDENTITY_SOURCE_UNSPECIFIED",
        "IDENTITY_SOURCE_DEFAULT_DERIVED",
        "IDENTITY_SOURCE_EXPLICIT",
    ),
    "FilterUpdateKind": (
        "FILTER_UPDATE_KIND_UNSPECIFIED",
        "FILTER_UPDATE_KIND_SNAPSHOT_CHUNK",
        "FILTER_UPDATE_KIND_DELTA",
        "FILTER_UPDATE_KIND_HEARTBEAT",
    ),
    "ServingReadinessState": (
        "SERVING_READINESS_STATE_UNKNOWN",
        "SERVING_READINESS_STATE_UNAVAILABLE",
        "SERVING_READINESS_STATE_READY",
    ),
    "WorkerRole": (
        "WORKER_ROLE_UNSPECIFIED",
        "WORKER_ROLE_PREFILL",
        "WORKER_ROLE_DECODE",
        "WORKER_ROLE_ENCODE",
        "WORKER_ROLE_AGGREGATED",
        "WORKER_ROLE_LEGACY",
    ),
    "KvQueryHashFormat": (
        "KV_QUERY_HASH_FORMAT_UNSPECIFIED",
        "KV_QUERY_HASH_FORMAT_DYNAMO_STANDARD_V1",
        "KV_QUERY_HASH_FORMAT_DYNAMO_EAGLE_V1",
    ),
}

_REQUEST = "1 subscriber_id string, 127 contract_marker fixed32"
_UPDATE = "1 protocol_version uint32, 2 relay RelayIdentity, 127 contract_marker fixed32"

TABLE = {
    "RelayIdentity": "1 drt_instance_id fixed64, 2 relay_incarnation fixed64",
    "DigestIdentity": "1 digest bytes, 2 source IdentitySource",
    "IndexerDomainId": "1 cache_semantics DigestIdentity, 2 routing_scope DigestIdentity",
    "KvPoolId": "1 identity_version uint32, 2 indexer_domain IndexerDomainId, 3 dc_id fixed64",
    "CkfFormat": (
        "1 format_version uint32, 2 seed fixed64, 3 bucket_count uint64, 4 fingerprint_bits uint32,"
        " 5 slots_per_bucket uint32"
    ),
    "ProducerIdentity": (
        "1 pool_id KvPoolId, 2 producer_incarnation fixed64, 3 layout_generation uint64, 4 ckf_format CkfFormat"
    ),
    "DynamoEndpointId": "1 namespace string, 2 component string, 3 endpoint string",
    "BaseModelTarget": "1 base_model string",
    "LoraModelTarget": "1 base_model string, 2 adapter string",
    "ModelTarget": "1 base BaseModelTarget|target, 2 lora LoraModelTarget|target",
    "ModelRegistration": "1 canonical_model_id string, 2 target ModelTarget, 3 aliases string*",
    "KvQuerySemantics": "1 kv_block_size uint32, 2 hash_format KvQueryHashFormat",
    "KvPoolDescriptor": (
        "1 producer ProducerIdentity, 2 serving_endpoint DynamoEndpointId, 3 registrations ModelRegistration*,"
        " 4 query_semantics KvQuerySemantics, 5 pool_roles WorkerRole*"
    ),
    "KvPoolCatalogSnapshot": "1 pools KvPoolDescriptor*",
    "RelayInfoRequest": "127 contract_marker fixed32",
    "RelayInfo": _UPDATE,
    "WatchKvPoolCatalogRequest": _REQUEST,
    "KvPoolCatalogUpdate": f"{_UPDATE}, 3 revision uint64, 4 snapshot KvPoolCatalogSnapshot",
    "SubscribeKvPoolRequest": f"{_REQUEST}, 2 expected_producer ProducerIdentity",
    "FilterUpdate": (
        f"{_UPDATE}, 3 producer ProducerIdentity, 4 base_sequence uint64, 5 sequence uint64, 6 send_ts_us uint64,"
        " 7 kind FilterUpdateKind, 8 payload bytes"
    ),
    "SubscribeServingReadinessRequest": _REQUEST,
    "TopologyMember": "1 endpoint DynamoEndpointId, 2 roles WorkerRole*, 3 pool_id KvPoolId?",
    "AdapterReadiness": "1 canonical_model_id string, 2 state ServingReadinessState, 3 missing_roles WorkerRole*",
    "TopologyEntry": (
        "1 namespace string, 2 canonical_model_id string, 3 state ServingReadinessState, 4 present_roles WorkerRole*,"
        " 5 missing_roles WorkerRole*, 6 members TopologyMember*, 7 duplicate_role_endpoints WorkerRole*,"
        " 8 legacy_fallback_active bool, 9 adapters AdapterReadiness*"
    ),
    "ServingReadinessUpdate": f"{_UPDATE}, 3 revision uint64, 4 entries TopologyEntry*",
    "SubscribeKvPoolLoadRequest": _REQUEST,
    "KvPoolLoadEntry": (
        "1 producer ProducerIdentity, 2 kv_used_blocks uint64, 3 total_kv_blocks uint64, 4 kv_observed_ranks uint32,"
        " 5 kv_expected_ranks uint32"
    ),
    "KvPoolLoadUpdate": (
        f"{_UPDATE}, 3 window_sequence uint64, 4 observed_ms uint64, 5 window_ms uint64, 6 pools KvPoolLoadEntry*"
    ),
}
"""Fields of each message, as in `message_tables`."""

METHODS = {
    "WatchKvPoolCatalog": "KvPoolCatalogUpdate",
    "SubscribeKvPool": "FilterUpdate",
    "SubscribeServingReadiness": "ServingReadinessUpdate",
    "SubscribeKvPoolLoad": "KvPoolLoadUpdate",
}
"""Streaming methods and their responses; each request is `<method>Request`."""

FILE = file_of("relay.proto", PACKAGE, TABLE, ENUMS)
_service = FILE.service.add(name="KvEventRelay")
_service.method.add(name="GetRelayInfo", input_type=f".{PACKAGE}.RelayInfoRequest", output_type=f".{PACKAGE}.RelayInfo")
for _name, _response in METHODS.items():
    _service.method.add(
        name=_name,
        input_type=f".{PACKAGE}.{_name}Request",
        output_type=f".{PACKAGE}.{_response}",
        server_streaming=True,
    )

CLASSES: dict[str, Any] = classes_of(FILE)
"""All messages by name."""


def number_of(enum: str, suffix: str) -> int:
    """Return the number of an enumeration's value by the end of its name. Raises `StopIteration` for an unknown one."""
    return next(number for number, value in enumerate(ENUMS[enum]) if value.endswith(f"_{suffix}"))
